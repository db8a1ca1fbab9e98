"""A TCP balancer in front of several routers, which records the router of each client's connection."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from tests.chaos.proxy import until_one_ends

_CHUNK_BYTES = 65536
_RETRY_SECONDS = 0.1
_MAX_SECONDS = 20.0


@dataclass(eq=False)
class Door:
    """A port of the balancer for one client. served_by: the backends of its connections so far, newest last."""

    address: str = ""
    served_by: list[str] = field(default_factory=list)


class Balancer:
    """Gives each new connection to the next backend that accepts it, over HTTP and gRPC alike.

    backends: HOST:PORT by protocol and name. Made by ``running_balancer``.
    """

    def __init__(self, backends: Mapping[str, Mapping[str, str]]) -> None:
        self._backends = backends
        self._turn = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def door(self, protocol: str) -> AsyncIterator[Door]:
        """Listen on a free port of this machine for one client."""
        door = Door()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._serve(protocol, door, reader, writer)

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        door.address = f"{host}:{port}"
        try:
            yield door
        finally:
            server.close()

    async def stop(self) -> None:
        """End every connection."""
        for task in set(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(
        self, protocol: str, door: Door, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Forward one connection until a side has closed it."""
        this = asyncio.current_task()
        assert this is not None
        self._tasks.add(this)
        try:
            with suppress(OSError, TimeoutError, asyncio.CancelledError):
                name, there, back = await self._open(self._backends[protocol])
                door.served_by.append(name)
                await _forward(reader, writer, there, back)
        finally:
            self._tasks.discard(this)
            writer.transport.abort()

    async def _open(
        self, backends: Mapping[str, str]
    ) -> tuple[str, asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the next backend that accepts. Raises TimeoutError if none does for a while."""
        names = list(backends)
        async with asyncio.timeout(_MAX_SECONDS):
            while True:
                self._turn += 1
                name = names[self._turn % len(names)]
                host, _, port = backends[name].rpartition(":")
                with suppress(OSError):
                    return name, *await asyncio.open_connection(host, int(port))
                await asyncio.sleep(_RETRY_SECONDS)


async def _forward(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    there: asyncio.StreamReader,
    back: asyncio.StreamWriter,
) -> None:
    try:
        await until_one_ends(_pump(reader, back), _pump(there, writer))
    finally:
        back.transport.abort()
        await _flushed(writer)


async def _flushed(writer: asyncio.StreamWriter) -> None:
    """Close a connection after what was written to it has left."""
    writer.close()
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(5):
            await writer.wait_closed()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(_CHUNK_BYTES):
        writer.write(chunk)
        await writer.drain()


@asynccontextmanager
async def running_balancer(backends: Mapping[str, Mapping[str, str]]) -> AsyncIterator[Balancer]:
    """Run a balancer; all its connections are closed at the end."""
    balancer = Balancer(backends)
    try:
        yield balancer
    finally:
        await balancer.stop()
