"""A router's memory while clients without a key send frames without end to its public gRPC port."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.http2 import HELLO, endless

MAX_GROWTH = 60 * 2**20
"""Without limits each of these attacks takes 250 MB or more, and gives nothing back."""
NUM_CONNECTIONS = 100
NUM_PIECES = 60


@pytest.fixture
def router(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Run a router process with an API key; yield its addresses and its process."""
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef" * 4)
    secret.chmod(0o600)
    keys = tmp_path / "keys"
    keys.write_text("k" * 32)
    keys.chmod(0o600)
    read_fd, write_fd = os.pipe()
    ports = [word for name in ("http", "grpc", "internal", "admin") for word in (f"--{name}", "127.0.0.1:0")]
    command = [sys.executable, "-m", "cli.main", "router", "--secret-file", str(secret), *ports]
    command += ["--api-keys-file", str(keys)]
    process = subprocess.Popen(
        [*command, "--ready-fd", str(write_fd)],
        stderr=subprocess.DEVNULL,
        pass_fds=(write_fd,),
    )
    os.close(write_fd)
    try:
        with os.fdopen(read_fd) as ready:
            yield {**json.loads(ready.readline()), "process": psutil.Process(process.pid)}
    finally:
        process.terminate()
        process.wait(20)


@pytest.mark.parametrize("name", ["continuation", "large references", "static references"])
async def test_memory_before_a_key_is_bounded(name: str, router: dict[str, Any]) -> None:
    before = router["process"].memory_full_info().uss
    for _ in range(NUM_CONNECTIONS // 20):
        await asyncio.gather(*(_attack(router["grpc"], name) for _ in range(20)))
    assert router["process"].memory_full_info().uss - before < MAX_GROWTH
    async with grpc.aio.insecure_channel(router["grpc"]) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=20)


async def _attack(address: str, name: str) -> None:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(20):
            writer.write(HELLO)
            for piece in islice(endless(name), NUM_PIECES):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            writer.write_eof()
            while await reader.read(2**16):
                pass
    writer.transport.abort()
