"""Starts servers for benchmarks, with a time limit for the start, and stops them by process id."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil

from benchmarks.others import tree
from benchmarks.settings import environment_of, service_environment
from contract.errors import UnavailableError
from contract.identity import Role
from launch.kept_process import ProcessSpec, start_child

_ROOT = Path(__file__).parents[1]
_LOOK_SECONDS = 0.5
_END_SECONDS = 20.0


class ServerError(Exception):
    """A server ended before it was ready, or was not ready in time; the message names its log."""


@dataclass(frozen=True)
class Server:
    """A running server. pids: by their names in the figures. root: ancestor of all of its processes."""

    url: str
    model: str
    root: int
    pids: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RouterProcess:
    """A running router without workers, and its addresses. internal: the one for workers."""

    http: str
    grpc: str
    internal: str
    pid: int


Start = Callable[[Path], AbstractAsyncContextManager[Server]]
"""Maps a folder for logs to a running server."""


@asynccontextmanager
async def kvbaton_server(
    folder: Path, model: Path, *arguments: str, time_limit: float
) -> AsyncIterator[Server]:
    """Run ``kvbaton up`` with these arguments; its log is in ``folder``. Raises ServerError."""
    ready = folder / "ready.json"
    ready.unlink(missing_ok=True)
    addresses = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    command = [sys.executable, "-m", "cli.main", "up", *addresses, "--ready-file", str(ready)]
    given = ["--model", str(model), "--served-model-name", "m", *arguments]
    async with started([*command, *given], service_environment(), folder / "kvbaton.log") as process:
        async with in_time(process, folder / "kvbaton.log", time_limit):
            while not ready.exists():
                await _pause(process)
        facts = json.loads(ready.read_text())
        pids = {one["name"]: one["pid"] for one in facts["processes"]}
        yield Server(f"http://{facts['http']}", "m", process.pid, pids)


@asynccontextmanager
async def router_process(
    folder: Path, secret: str, model: Path, *arguments: str, time_limit: float
) -> AsyncIterator[RouterProcess]:
    """Run ``kvbaton router`` with these arguments; its log is in ``folder``. Raises ServerError."""
    file = folder / "secret"
    file.touch(mode=0o600)
    file.write_text(secret)
    log = folder / "router.log"
    command = ["bash", "-c", 'exec "$@" >"$0" 2>&1', str(log), sys.executable, "-m", "cli.main", "router"]
    command += ["--secret-file", str(file), "--model", str(model), "--served-model-name", "m", *arguments]
    for name in ("http", "grpc", "internal", "admin"):
        command += [f"--{name}", "127.0.0.1:0"]
    child = await start_child(
        ProcessSpec("router", Role.ROUTER, lambda _: command, env=service_environment()), {}
    )
    try:
        try:
            facts = await asyncio.wait_for(child.wait_ready(), time_limit)
        except (TimeoutError, UnavailableError) as error:
            raise ServerError(f"the router was not ready within {time_limit:g} s; see {log}") from error
        yield RouterProcess(facts["http"], facts["grpc"], facts["internal"], child.pid)
    finally:
        await child.stop(_END_SECONDS)


@asynccontextmanager
async def vllm_server(
    folder: Path, model: Path, python: str, *arguments: str, time_limit: float
) -> AsyncIterator[Server]:
    """Run vLLM's OpenAI server on all cores; its log is in ``folder``. Raises ServerError."""
    port = _free_port()
    cores = tuple(sorted(os.sched_getaffinity(0)))
    command = [python, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "m"]
    command += ["--dtype", "bfloat16", "--max-model-len", "2048", "--no-enable-prefix-caching", *arguments]
    environment = environment_of("vllm_cpu", cores)
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]  # a server runs its engine in a separate process
    url = f"http://127.0.0.1:{port}"
    async with (
        started(command, environment, folder / "vllm.log") as process,
        aiohttp.ClientSession() as session,
    ):
        async with in_time(process, folder / "vllm.log", time_limit):
            while not await _answers(session, f"{url}/v1/models"):
                await _pause(process)
        yield Server(url, "m", process.pid)


@asynccontextmanager
async def started(
    command: list[str], environment: Mapping[str, str], log: Path
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a program within the block, and stop it and its children afterwards."""
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=_ROOT,
            env=dict(environment),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield process
    finally:
        started = [psutil.Process(pid) for pid in tree(process.pid)]
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _END_SECONDS)
        for one in started:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        await process.wait()


@asynccontextmanager
async def in_time(process: asyncio.subprocess.Process, log: Path, seconds: float) -> AsyncIterator[None]:
    """Raise ServerError if the block takes longer than ``seconds``, or raises ChildProcessError."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except (TimeoutError, ChildProcessError) as error:
        state = "took too long" if process.returncode is None else f"ended with {process.returncode}"
        raise ServerError(f"the server {state} to start; see {log}") from error


async def _pause(process: asyncio.subprocess.Process) -> None:
    """Wait a moment. Raises ChildProcessError if the process has ended."""
    if process.returncode is not None:
        raise ChildProcessError
    await asyncio.sleep(_LOOK_SECONDS)


async def _answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url) as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
