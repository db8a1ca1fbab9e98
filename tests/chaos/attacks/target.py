"""The service under attack: a whole ``kvbaton up`` with two API keys, and what can be measured from outside."""

import asyncio
import json
import re
import secrets
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.settings import process_environment

MODEL = "demo"
_START_SECONDS = 120
_STOP_SECONDS = 60
_FLAGS = ("--prefill=1", "--decode=1", "--dtype=float32", "--num-threads=1", f"--served-model-name={MODEL}")
_POOL_FLAG = f"--kv-cache-bytes={64 * 2**20}"


@dataclass(frozen=True)
class Target:
    """A running service. attacker_key, bystander_key: two valid API keys. processes: as listed in the ready file.

    attack_seconds: the minimum length of an attack.
    """

    http: str
    grpc: str
    processes: list[dict[str, Any]]
    attacker_key: str
    bystander_key: str
    log: Path
    attack_seconds: float = 15.0

    @classmethod
    def from_json(cls, text: str) -> "Target":
        """Return the target that ``as_json`` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "log": Path(fields["log"])})

    def as_json(self) -> str:
        """Return all fields as JSON, for the process of an attacker."""
        return json.dumps({**asdict(self), "log": str(self.log)})

    def roots(self) -> dict[str, int]:
        """Return the process id of the router and of each worker, by name."""
        return {process["name"]: process["pid"] for process in self.processes}

    def memory(self) -> dict[str, int]:
        """Return the anonymous memory in bytes of each process of the service, its children included."""
        return {name: sum(map(_anonymous_bytes, _tree(pid))) for name, pid in self.roots().items()}

    def log_bytes(self) -> int:
        """Return the size of the log of all processes."""
        return self.log.stat().st_size

    def internal_ports(self) -> list[tuple[str, int]]:
        """Return the addresses on which the workers listen, without their admin ports."""
        admins = {process["admin"] for process in self.processes}
        return [
            (connection.laddr.ip, connection.laddr.port)
            for process in self.processes
            if process["role"] != "router"
            for pid in _tree(process["pid"])
            for connection in _connections(pid)
            if connection.status == psutil.CONN_LISTEN
            and f"{connection.laddr.ip}:{connection.laddr.port}" not in admins
        ]

    def unix_sockets(self) -> list[str]:
        """Return the paths of the Unix sockets on which the service listens."""
        names = Path("/proc/net/unix").read_text().splitlines()
        return sorted({line.split()[-1] for line in names if re.search(r" /\S*kvbaton\S*$", line)})


@asynccontextmanager
async def attacked_service(folder: Path, python: str, max_files: int = 1024) -> AsyncIterator[Target]:
    """Start a service from the installation of ``python``, and stop it at the end.

    max_files: soft and hard limit of open files for each of its processes.
    """
    keys = [secrets.token_hex(16) for _ in range(2)]
    keys_file, ready_file, log = folder / "keys", folder / "ready.json", folder / "service.log"
    keys_file.touch(mode=0o600)
    keys_file.write_text("\n".join(keys) + "\n")
    flags = (*_FLAGS, _POOL_FLAG, f"--ready-file={ready_file}")
    addresses = ("--http=127.0.0.1:0", "--grpc=127.0.0.1:0")
    command = [python, "-P", "-m", "cli.main", "up", *flags, *addresses]
    with log.open("ab") as stream:
        process = await asyncio.create_subprocess_exec(
            *("prlimit", f"--nofile={max_files}:{max_files}", *command),
            stdout=subprocess.DEVNULL,
            stderr=stream,
            env={**process_environment(), "KVBATON_API_KEYS_FILE": str(keys_file)},
        )
    try:
        ready = await _until_ready(process, ready_file, log)
        yield Target(ready["http"], ready["grpc"], ready["processes"], keys[0], keys[1], log)
    finally:
        await _stop(process)


async def _until_ready(process: asyncio.subprocess.Process, ready_file: Path, log: Path) -> dict[str, Any]:
    async with asyncio.timeout(_START_SECONDS):
        while not ready_file.exists():
            if process.returncode is not None:
                raise AssertionError(
                    f"kvbaton up ended with exit code {process.returncode}:\n{log.read_text()[-3000:]}"
                )
            await asyncio.sleep(0.1)
    ready: dict[str, Any] = json.loads(ready_file.read_text())
    return ready


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Stop the service by SIGTERM, or by SIGKILL if an attack has broken it."""
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), _STOP_SECONDS)
        return
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
    await process.wait()


def _tree(root: int) -> Iterator[int]:
    with suppress(psutil.NoSuchProcess):
        yield root
        yield from (child.pid for child in psutil.Process(root).children(recursive=True))


def _anonymous_bytes(pid: int) -> int:
    with suppress(OSError):
        found = re.search(r"^RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.M)
        return int(found[1]) * 1024 if found else 0
    return 0


def _connections(pid: int) -> Any:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).net_connections("tcp")
    return []
