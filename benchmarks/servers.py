"""Servers that benchmarks start, each with a time limit for its start, and stop by their process ids."""

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

_ROOT = Path(__file__).parents[1]
_LOOK_SECONDS = 0.5
_END_SECONDS = 20.0


class ServerError(Exception):
    """A server ended before it was ready, or was not ready in time; the words say where its log is."""


@dataclass(frozen=True)
class Server:
    """A running server. pids: by what the figures call them; all of its processes are below ``root``."""

    url: str
    model: str
    root: int
    pids: Mapping[str, int] = field(default_factory=dict)


Start = Callable[[Path], AbstractAsyncContextManager[Server]]
"""A folder for logs → a running server."""


@asynccontextmanager
async def kvbaton_server(
    folder: Path, model: Path, *arguments: str, time_limit: float
) -> AsyncIterator[Server]:
    """``kvbaton up`` with these arguments; ``folder`` gets its log. Raises ServerError."""
    ready = folder / "ready.json"
    ready.unlink(missing_ok=True)
    addresses = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    command = [sys.executable, "-m", "cli.main", "up", *addresses, "--ready-file", str(ready)]
    given = ["--model", str(model), "--served-model-name", "m", *arguments]
    async with started([*command, *given], service_environment(), folder / "kvbaton.log") as process:
        async with in_time(process, folder / "kvbaton.log", time_limit):
            while not ready.exists():
                await _pause(process)
        told = json.loads(ready.read_text())
        pids = {one["name"]: one["pid"] for one in told["processes"]}
        yield Server(f"http://{told['http']}", "m", process.pid, pids)


@asynccontextmanager
async def vllm_server(
    folder: Path, model: Path, python: str, *arguments: str, time_limit: float
) -> AsyncIterator[Server]:
    """The OpenAI server of vLLM on all cores; ``folder`` gets its log. Raises ServerError."""
    port, cores = _free_port(), tuple(sorted(os.sched_getaffinity(0)))
    command = [python, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "m"]
    command += ["--dtype", "bfloat16", "--max-model-len", "2048", "--no-enable-prefix-caching", *arguments]
    environment = environment_of("vllm_cpu", cores)
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]  # a server has its engine in a process of its own
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
    """A program, which is ended with all that it has started when the block is left."""
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
    """Raises ServerError where the block takes longer, or raises ChildProcessError."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except (TimeoutError, ChildProcessError) as error:
        state = "took too long" if process.returncode is None else f"ended with {process.returncode}"
        raise ServerError(f"the server {state} to start; see {log}") from error


async def _pause(process: asyncio.subprocess.Process) -> None:
    """Raises ChildProcessError where there is nothing to wait for any more."""
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
