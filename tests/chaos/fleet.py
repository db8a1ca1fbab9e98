"""A router and workers started one by one as an operator does: own processes, fixed ports, stopped and killed singly."""

import asyncio
import os
import re
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from contract.errors import UnavailableError
from contract.identity import Role
from launch.kept_process import Child, Facts, ProcessSpec, start_child
from tests.chaos.held_resources import State, count, read_metrics, read_states
from tests.chaos.priority import calm, hurry
from tests.chaos.settings import process_environment

ROUTER = "router"
STOP_SECONDS = 15.0
WORKER_HOST = "127.0.0.2"
LINK_HOST = "127.0.0.3"


def role_of(name: str) -> Role:
    """Return the role of a worker: its name begins with it."""
    return Role(name.partition("-")[0])


_PORTS = range(20000, 32768)
"""Below the ephemeral ports of the kernel: an outgoing connection could take a port before its owner does."""
_taken: set[int] = set()


def free_port(host: str) -> int:
    """Return a port that is free now, and never the same one twice; another process may still take it."""
    while True:
        port = _PORTS[secrets.randbelow(len(_PORTS))]
        if port in _taken:
            continue
        _taken.add(port)
        with socket.socket() as sock, suppress(OSError):
            sock.bind((host, port))
            return port


@dataclass
class Fleet:
    """Owns processes by name. Created by ``running_fleet``, which stops those that still run."""

    folder: Path
    flags: dict[str, dict[str, Any]] = field(default_factory=dict)
    children: dict[str, Child] = field(default_factory=dict)
    facts: dict[str, Facts] = field(default_factory=dict)

    async def start(self, name: str, role: Role, **flags: Any) -> None:
        """Start a process and wait until it is ready; ``flags``: its settings."""
        self.flags[name] = {"role": role, **flags}
        await self._launch(name)
        await self.ready(name)

    async def _launch(self, name: str) -> None:
        given = dict(self.flags[name])
        role = given.pop("role")
        arguments = [_argument(flag.replace("_", "-"), value) for flag, value in given.items()]
        log = (self.folder / f"{name}.log").open("ab")
        command = ["bash", "-c", 'exec "$@" 2>>"$0"', log.name]
        log.close()
        command += [sys.executable, "-P", "-m", "cli.main", role.value, *arguments]
        spec = ProcessSpec(name, role, lambda _: command, env=process_environment())
        self.children[name] = await start_child(spec, {})
        hurry(self.children[name].pid)

    async def ready(self, name: str) -> None:
        """Wait until a process is ready; raises UnavailableError with the end of its log if it ends before."""
        try:
            self.facts[name] = await self.children[name].wait_ready()
        except UnavailableError as error:
            log = (self.folder / f"{name}.log").read_text()[-2000:]
            raise UnavailableError(f"{name}: {error.message}\n{log}") from error
        calm(self.children[name].pid)

    async def start_worker(
        self, name: str, role: Role, *, routers: Sequence[str] = (ROUTER,), **flags: Any
    ) -> None:
        """Start a worker of these routers with the demo model, and wait until it is registered. flags: come first."""
        usual = {
            "router": ",".join(self.facts[router]["internal"] for router in routers),
            "kv_cache_bytes": 64 * 2**20,
        }
        await self.start(
            name,
            role,
            worker_id=name,
            secret_file=self.secret_file,
            dtype="float32",
            num_threads=1,
            admin="127.0.0.1:0",
            **{**usual, **flags},
        )

    @property
    def secret_file(self) -> Path:
        """The file with the cluster secret."""
        return self.folder / "secret"

    async def kill(self, name: str) -> None:
        """Kill a process with SIGKILL, but not its children, which must detect it. Returns when it is dead."""
        os.kill(self.children[name].pid, signal.SIGKILL)
        await self.children[name].wait()

    async def terminate(self, name: str, *, is_twice: bool = False) -> int:
        """Send SIGTERM to a process, and once more a moment later if ``is_twice``; return its exit code."""
        hurry = asyncio.Event()
        if is_twice:
            asyncio.get_running_loop().call_later(0.3, hurry.set)
        return await self.children[name].stop(120.0, hurry)

    async def order(self, worker: str, path: str) -> tuple[int, dict[str, Any]]:
        """POST to the router's admin API about a worker; return status and body."""
        url = f"http://{self.facts[ROUTER]['admin']}/admin/workers/{worker}/{path}"
        async with aiohttp.ClientSession() as session, session.post(url) as response:
            return response.status, await response.json()

    async def drains(self) -> dict[str, int]:
        """Return the number of ended drains by result, since the router's start."""
        text = await read_metrics(self.facts[ROUTER]["admin"])
        found = re.findall(r'^kvbaton_drains_total\{result="(\w+)"\} ([\d.]+)$', text, re.M)
        return {result: int(float(value)) for result, value in found}

    async def restart(self, name: str) -> None:
        """Start an ended process again, with the same flags."""
        await self._launch(name)
        await self.ready(name)

    def freeze(self, name: str) -> None:
        """Send SIGSTOP to the process and its engine."""
        os.killpg(self.children[name].pid, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """Send SIGCONT to the process and its engine."""
        os.killpg(self.children[name].pid, signal.SIGCONT)

    async def states(self) -> dict[str, State]:
        """Return /debug/state of every process."""
        return await read_states([(name, facts["admin"]) for name, facts in self.facts.items()])

    async def attached(self) -> set[str]:
        """Return the names of the workers that the router counts as available."""
        states = await read_states([(ROUTER, self.facts[ROUTER]["admin"])])
        return {worker["worker_id"] for worker in states[ROUTER]["workers"] if worker["max_requests"]}

    async def until_serving(self) -> None:
        """Wait until the router's /health is good, at most half a minute."""
        async with asyncio.timeout(30), aiohttp.ClientSession() as session:
            while True:
                async with session.get(f"http://{self.facts[ROUTER]['http']}/health") as response:
                    if response.status == 200:
                        return
                await asyncio.sleep(0.05)

    async def num_replays(self) -> float:
        """Return the number of attempts since the router's start that failed and were followed by another one."""
        return count([await read_metrics(self.facts[ROUTER]["admin"])], "kvbaton_request_replays_total")

    async def num_pulled_again(self, worker: str) -> float:
        """Return the number of reads since this worker's start that failed and were followed by another one."""
        return count([await read_metrics(self.facts[worker]["admin"])], "kvbaton_transfer_pulled_again_total")

    async def stop_all(self) -> None:
        """Stop all at once by SIGTERM, and by SIGKILL those that do not end. Frozen ones are resumed first."""
        for name in self.children:
            with suppress(ProcessLookupError):
                self.thaw(name)
        await asyncio.gather(*(child.stop(STOP_SECONDS) for child in self.children.values()))


def _argument(flag: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    return f"--{flag}={value}"


@asynccontextmanager
async def running_fleet(folder: Path, **router_flags: Any) -> AsyncIterator[Fleet]:
    """Run a fleet with a router on fixed ports; all its processes are stopped at the end."""
    fleet = Fleet(folder)
    handle = os.open(fleet.secret_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as stream:
        stream.write(secrets.token_hex(16))
    ports = {name: f"127.0.0.1:{free_port('127.0.0.1')}" for name in ("http", "grpc", "internal", "admin")}
    try:
        await fleet.start(ROUTER, Role.ROUTER, secret_file=fleet.secret_file, **ports, **router_flags)
        yield fleet
    finally:
        await fleet.stop_all()
