"""A gRPC port with a front, an echo behind it, and clients over plain sockets."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc

from serving.grpc_front import GrpcFront, start_front
from serving.grpc_options import public_server_options
from serving.http_connections import HttpLimits
from serving.penalties import Penalties

PATIENT = 60.0
LARGE = 8 * 2**20
METHOD = "/test.Echo/Echo"
ALONE = ("grpc.use_local_subchannel_pool", 1)


@dataclass
class Door:
    """A front with an echo behind it. peers: the names of the clients of all calls. num_counted: messages of streams."""

    front: GrpcFront
    address: str = ""
    peers: list[str] = field(default_factory=list)
    num_counted: int = 0

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self.address.rpartition(":")
        return await asyncio.open_connection(host.strip("[]"), int(port))

    async def check(self) -> None:
        """Raise unless a good client is served."""
        async with grpc.aio.insecure_channel(self.address, options=[ALONE]) as channel:
            assert await echo(channel)(b"hello", timeout=20) == b"hello"

    async def end_of(self, *pieces: bytes) -> bytes:
        """Send bytes on a connection, and return what came until the front ended it."""
        reader, writer = await self.connect()
        try:
            async with asyncio.timeout(20):
                with suppress(ConnectionError):
                    writer.writelines(pieces)
                    await writer.drain()
                received = b""
                with suppress(ConnectionError):
                    while piece := await reader.read(2**16):
                        received += piece
                return received
        finally:
            writer.transport.abort()


def echo(channel: grpc.aio.Channel) -> Any:
    return channel.unary_unary(METHOD)


@asynccontextmanager
async def serving(
    limits: HttpLimits,
    tls: ssl.SSLContext | None = None,
    address: str = "127.0.0.1:0",
    penalties: Penalties | None = None,
) -> AsyncIterator[Door]:
    door: Door

    async def answer(request: bytes, context: Any) -> bytes:
        door.peers.append(context.peer())
        await context.send_initial_metadata(
            [(k, v) for k, v in context.invocation_metadata() if k[:2] == "x-"]
        )
        return request

    async def count(request: bytes, _context: Any) -> AsyncIterator[bytes]:
        how_many, size = map(int, request.split())
        for number in range(how_many):
            door.num_counted += 1
            yield str(number).encode().rjust(size)

    async def hold(_requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
        yield b"held"
        await asyncio.sleep(PATIENT)

    server = grpc.aio.server(
        options=public_server_options(
            2 * LARGE, max_connections=1000, handshake_seconds=10, idle_seconds=PATIENT, call_seconds=10
        )
    )
    handlers: dict[str, Any] = {
        "Echo": grpc.unary_unary_rpc_method_handler(answer),
        "Hold": grpc.stream_stream_rpc_method_handler(hold),
        "Count": grpc.unary_stream_rpc_method_handler(count),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", handlers),))
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    front, bound = await start_front(
        server, address, param="grpc", limits=limits, tls=tls, penalties=penalties
    )
    door = Door(front, bound)
    try:
        yield door
    finally:
        front.stop_listening()
        await server.stop(0)
        front.close()
