"""Starts `kvbaton up` as a user would, and sends requests over gRPC, HTTP and its admin ports."""

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from tests.chaos.settings import process_environment

START_SECONDS = 280
_PATIENT = {"KVBATON_WORKER_WAIT_SECONDS": str(START_SECONDS), "KVBATON_MAX_WORKER_DEATHS": "100"}
"""Tests kill workers at random, and no request may end for it.

On a busy machine a killed worker is back after more than the 30 s for which requests wait by default. By default, a request
ends that is present at three deaths, since it may be their cause.
"""
_SMALL_POOLS = {"KVBATON_KV_CACHE_BYTES": str(256 * 2**20)}


@dataclass
class Service:
    """A running `kvbaton up`: its addresses and its supervisor process."""

    process: asyncio.subprocess.Process
    ready_file: Path
    http: str = ""
    grpc: str = ""
    processes: list[dict[str, Any]] = field(default_factory=list)

    def read_ready(self) -> None:
        """Read addresses and processes from the ready file."""
        ready = json.loads(self.ready_file.read_text())
        self.http, self.grpc, self.processes = ready["http"], ready["grpc"], ready["processes"]

    async def metrics(self, role: str) -> list[str]:
        """Return the /metrics text of every process of a role."""
        return [await self.get_text(p["admin"], "/metrics") for p in self.processes if p["role"] == role]

    async def debug_states(self) -> dict[str, dict[str, Any]]:
        """Return /debug/state of every process, by process name."""
        return {p["name"]: await self.state_of(p["admin"]) for p in self.processes}

    async def state_of(self, admin: str) -> dict[str, Any]:
        """Return /debug/state of the process with this admin address."""
        state: dict[str, Any] = json.loads(await self.get_text(admin, "/debug/state"))
        return state

    async def busiest_decoder(self) -> int:
        """Return the process id of the decode worker with the most requests."""
        workers = [process for process in self.processes if process["role"] == "decode"]
        states = [await self.state_of(worker["admin"]) for worker in workers]
        _, pid = max(
            (len(state["requests"]), worker["pid"]) for state, worker in zip(states, workers, strict=True)
        )
        return int(pid)

    async def get_text(self, address: str, path: str) -> str:
        """Send a GET request and return the body."""
        async with aiohttp.ClientSession() as session, session.get(f"http://{address}{path}") as response:
            return await response.text()

    async def post(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        """POST JSON to the public port; return status and body."""
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"http://{self.http}{path}", json=body) as response,
        ):
            return response.status, await response.json()


@dataclass
class Answer:
    """One answer of Generate."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: int = 0
    usage: pb.Usage | None = None
    timings: pb.Timings | None = None


async def generate(stub: Any, request: pb.GenerateRequest) -> Answer:
    """Run one Generate call to its end."""
    answer = Answer()
    async for message in stub.Generate(request, timeout=120):
        for choice in message.choices:
            answer.token_ids += choice.token_ids
            answer.text += choice.text
            answer.finish_reason = choice.finish_reason or answer.finish_reason
        if message.HasField("usage"):
            answer.usage, answer.timings = message.usage, message.timings
    return answer


async def generate_all(address: str, requests: list[pb.GenerateRequest], at_once: int) -> list[Answer]:
    """Run many Generate calls, ``at_once`` at a time; return the answers in the order of the requests."""
    gate = asyncio.Semaphore(at_once)
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = inference_pb2_grpc.InferenceStub(channel)

        async def one(request: pb.GenerateRequest) -> Answer:
            async with gate:
                return await generate(stub, request)

        return await asyncio.gather(*(one(request) for request in requests))


@asynccontextmanager
async def running_service(
    folder: Path, *arguments: str, has_small_pools: bool = True
) -> AsyncIterator[Service]:
    """Run `kvbaton up` with free ports and ``arguments``, ready to answer; stop it by SIGTERM at the end.

    has_small_pools: workers start with 256 MiB for KV, since allocating a default pool takes a second for each worker.
    """
    ready_file = folder / "ready.json"
    environment = {**_PATIENT, **process_environment()}
    with (folder / "service.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "cli.main", "up", "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"),
            *("--ready-file", str(ready_file)),
            *arguments,
            stdout=subprocess.DEVNULL,
            stderr=log,
            env={**_SMALL_POOLS, **environment} if has_small_pools else environment,
        )
    service = Service(process, ready_file)
    try:
        await _wait_ready(service)
        yield service
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), 30)


async def _wait_ready(service: Service) -> None:
    async with asyncio.timeout(START_SECONDS):
        while not service.ready_file.exists():
            if service.process.returncode is not None:
                log = (service.ready_file.parent / "service.log").read_text()
                raise AssertionError(f"kvbaton up ended with exit code {service.process.returncode}:\n{log}")
            await asyncio.sleep(0.1)
    service.read_ready()


def counter(texts: list[str], name: str, **labels: str) -> float:
    """Return the sum of one counter over several /metrics texts; fail if no text has the name."""
    total, found = 0.0, False
    others = []
    for text in texts:
        for line in text.splitlines():
            match = re.match(r"(\w+)(?:\{([^}]*)\})? (\S+)$", line)
            if match is None or match[1] != name:
                continue
            others.append(line)
            have = dict(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
            if all(have.get(key) == value for key, value in labels.items()):
                total, found = total + float(match[3]), True
    if not found:
        raise AssertionError(f"no process exports {name} with {labels}, but {others}")
    return total
