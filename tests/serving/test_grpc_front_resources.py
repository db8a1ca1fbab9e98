"""Descriptors that end, and what a killed front leaves behind."""

import asyncio
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack

import pytest

from contract.addresses import split_address
from serving.http_connections import HttpLimits
from tests.chaos.settings import process_environment
from tests.descriptors import no_descriptor_left
from tests.http2 import HELLO
from tests.serving.grpc_door import PATIENT, serving


async def test_without_descriptors_a_client_is_told_so_and_the_next_one_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A1: a client takes three; the front neither spins nor keeps it waiting in silence."""

    def num_pauses() -> int:
        return caplog.text.count("no connection can be accepted")

    async with serving(HttpLimits(header_seconds=PATIENT)) as door:
        host, port = split_address(door.address)
        reader, writer = await door.connect()
        with ExitStack() as stack:
            waiting = stack.enter_context(socket.socket())
            async with asyncio.timeout(20):
                while len(door.front.connections) < 1:
                    await asyncio.sleep(0.01)
                stack.enter_context(no_descriptor_left())
                writer.write(HELLO)
                assert (
                    b"no connection to gRPC's server can be made: Too many open files" in await reader.read()
                )
                waiting.connect((host, port))
                while not num_pauses():
                    await asyncio.sleep(0.01)
                for _ in range(100):
                    await asyncio.sleep(0)
                assert num_pauses() < 5, "it spins"
        writer.transport.abort()
        await door.check()


@pytest.fixture
def short_folder() -> Iterator[str]:
    """A folder whose path leaves room for the name of a socket."""
    with tempfile.TemporaryDirectory() as folder:
        yield folder


KILLED = """
import asyncio, grpc.aio, os, signal, tempfile
from serving.grpc_front import start_front
from serving.http_connections import HttpLimits

async def main():
    await start_front(grpc.aio.server(), "127.0.0.1:0", param="grpc", limits=HttpLimits())
    print(*os.listdir(tempfile.gettempdir()), flush=True)
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def test_the_next_front_removes_what_a_killed_one_has_left(short_folder: str) -> None:
    """A1: folders of killed routers stayed for ever; those of living ones stay as long as they live."""
    processes = AsyncExitStack()

    async def started() -> tuple[asyncio.subprocess.Process, set[str]]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", KILLED),
            env={**process_environment(), "TMPDIR": short_folder},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        processes.push_async_callback(end, process)
        assert process.stdout is not None
        return process, set((await process.stdout.readline()).decode().split())

    async def end(process: asyncio.subprocess.Process) -> None:
        if process.returncode is None:
            await process.communicate(b"x")
        assert process.returncode == -signal.SIGKILL

    async with processes:
        _, first = await started()
        killed, both = await started()
        assert len(first) == 1 and first < both and len(both) == 2
        await end(killed)
        _, found = await started()
        assert first < found and not found & (both - first) and len(found) == 2
