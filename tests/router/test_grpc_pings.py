"""A gRPC connection with an open call is not silent for longer than the setting: the server pings."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio

from protos import inference_pb2 as pb
from tests.fakes.router.script import Script
from tests.router.cluster import running_cluster
from tests.router.test_ends import TOKENS

_PING = 6
_ACK = 1


class PingCount:
    """Forwards connections to a gRPC server and counts the pings that it sends by itself."""

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._pinged = asyncio.Semaphore(0)

    async def wait(self) -> None:
        """Block until one more ping came."""
        async with asyncio.timeout(20):
            await self._pinged.acquire()

    async def relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._host, int(self._port))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_copy(reader, back))
                group.create_task(self._copy_frames(there, writer))
        finally:
            back.close()
            writer.close()

    async def _copy_frames(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.read(9):
            head += await reader.readexactly(9 - len(head))
            writer.write(head + await reader.readexactly(int.from_bytes(head[:3], "big")))
            if head[3] == _PING and not head[4] & _ACK:
                self._pinged.release()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
    writer.write_eof()


@asynccontextmanager
async def counting(target: str) -> AsyncIterator[tuple[PingCount, str]]:
    count = PingCount(target)
    server = await asyncio.start_server(count.relay, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server:
        yield count, f"{host}:{port}"


async def test_the_server_pings_while_a_call_waits_for_a_token() -> None:
    async with (
        running_cluster(Script(tokens=TOKENS, stall_at=1), stream_keep_alive_seconds=0.5) as cluster,
        counting(cluster.service.addresses.grpc) as (count, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        call = cluster.inference(channel).Generate(pb.GenerateRequest(text="x"))
        await call.read()
        for _ in range(2):
            await count.wait()
        call.cancel()
