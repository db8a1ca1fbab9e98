"""A router and workers as an operator starts them one by one: own processes, fixed ports, stopped and killed singly."""

import asyncio
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from contract.errors import UnavailableError
from contract.identity import Role
from launch.child import Child, start_child
from launch.spec import Facts, ProcessSpec
from tests.chaos.books import State, count, read_metrics, read_states
from tests.chaos.settings import process_environment

ROUTER = "router"
STOP_SECONDS = 15.0
WORKER_HOST = "127.0.0.2"
LINK_HOST = "127.0.0.3"


_PORTS = range(20000, 32768)
"""Below those that the kernel gives to connections on their way out, which could take a port before its owner does."""
_taken: set[int] = set()


def free_port(host: str) -> int:
    """A port that nobody listens on now, and never the same one twice; a process that starts soon may take it."""
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
    """Processes by name. Owns them; made by ``running_fleet``, which stops what is left."""

    folder: Path
    flags: dict[str, dict[str, Any]] = field(default_factory=dict)
    children: dict[str, Child] = field(default_factory=dict)
    facts: dict[str, Facts] = field(default_factory=dict)

    async def start(self, name: str, role: Role, **flags: Any) -> None:
        """Start a process and wait until it is ready; ``flags`` are its settings."""
        self.flags[name] = {"role": role, **flags}
        await self._launch(name)
        await self.ready(name)

    async def _launch(self, name: str) -> None:
        given = dict(self.flags[name])
        role = given.pop("role")
        arguments = [f"--{flag.replace('_', '-')}={value}" for flag, value in given.items()]
        log = (self.folder / f"{name}.log").open("ab")
        command = ["bash", "-c", 'exec "$@" 2>>"$0"', log.name]
        log.close()
        command += [sys.executable, "-P", "-m", "cli.main", role.value, *arguments]
        spec = ProcessSpec(name, role, lambda _: command, env=process_environment())
        self.children[name] = await start_child(spec, {})

    async def ready(self, name: str) -> None:
        """Wait until it is ready; raises UnavailableError with the end of its log when it ends before."""
        try:
            self.facts[name] = await self.children[name].wait_ready()
        except UnavailableError as error:
            log = (self.folder / f"{name}.log").read_text()[-2000:]
            raise UnavailableError(f"{name}: {error.message}\n{log}") from error

    async def start_worker(self, name: str, role: Role, **flags: Any) -> None:
        """Start a worker of this fleet's router on the demo model, and wait until it is attached."""
        await self.start(
            name,
            role,
            worker_id=name,
            router=self.facts[ROUTER]["internal"],
            secret_file=self.secret_file,
            dtype="float32",
            num_threads=1,
            kv_cache_bytes=64 * 2**20,
            admin="127.0.0.1:0",
            **flags,
        )

    @property
    def secret_file(self) -> Path:
        """The cluster's secret."""
        return self.folder / "secret"

    async def kill(self, name: str) -> None:
        """Kill -9, of the process alone: its children have to notice. Returns when it is dead."""
        os.kill(self.children[name].pid, signal.SIGKILL)
        await self.children[name].wait()

    async def restart(self, name: str) -> None:
        """Start a process that has ended again, with the same flags."""
        await self._launch(name)
        await self.ready(name)

    def freeze(self, name: str) -> None:
        """SIGSTOP to the process and its engine."""
        os.killpg(self.children[name].pid, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """SIGCONT to the process and its engine."""
        os.killpg(self.children[name].pid, signal.SIGCONT)

    async def states(self) -> dict[str, State]:
        """/debug/state of every process."""
        return await read_states([(name, facts["admin"]) for name, facts in self.facts.items()])

    async def attached(self) -> set[str]:
        """Names of the workers that the router counts on."""
        states = await read_states([(ROUTER, self.facts[ROUTER]["admin"])])
        return {worker["worker_id"] for worker in states[ROUTER]["workers"] if worker["max_requests"]}

    async def until_serving(self) -> None:
        """Until the router's /health says so, at most for half a minute."""
        async with asyncio.timeout(30), aiohttp.ClientSession() as session:
            while True:
                async with session.get(f"http://{self.facts[ROUTER]['http']}/health") as response:
                    if response.status == 200:
                        return
                await asyncio.sleep(0.05)

    async def num_replays(self) -> float:
        """Attempts that failed and were followed by another one, since the router's start."""
        return count([await read_metrics(self.facts[ROUTER]["admin"])], "kvbaton_request_replays_total")

    async def num_pulled_again(self, worker: str) -> float:
        """Reads of this worker that failed and were followed by another one, since its start."""
        return count([await read_metrics(self.facts[worker]["admin"])], "kvbaton_transfer_pulled_again_total")

    async def stop_all(self) -> None:
        """SIGTERM to all, SIGKILL to those that do not hear it. Frozen ones are woken first."""
        for name, child in self.children.items():
            with suppress(ProcessLookupError):
                self.thaw(name)
            await child.stop(STOP_SECONDS)


@asynccontextmanager
async def running_fleet(folder: Path, **router_flags: Any) -> AsyncIterator[Fleet]:
    """A fleet with a router on fixed ports; nothing of it runs afterwards."""
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
