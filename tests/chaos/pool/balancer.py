"""A TCP balancer in front of several routers, which remembers the router of each client's connection."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

from tests.chaos.proxy import until_one_ends

_CHUNK_BYTES = 65536
_RETRY_SECONDS = 0.1
_MAX_SECONDS = 20.0


class Balancer:
    """Gives each new connection to the next backend that accepts it. backends: HOST:PORT by name.

    by_client: the backend's name by the port of the client. Made by ``running_balancer``.
    """

    def __init__(self, backends: Mapping[str, str]) -> None:
        self.by_client: dict[int, str] = {}
        self.address = ""
        self._backends = dict(backends)
        self._turn = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection until a side has closed it."""
        this = asyncio.current_task()
        assert this is not None
        self._tasks.add(this)
        try:
            with suppress(OSError, TimeoutError, asyncio.CancelledError):
                await self._forward(reader, writer)
        finally:
            self._tasks.discard(this)
            writer.transport.abort()

    async def stop(self) -> None:
        """End every connection."""
        for task in set(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name, there, back = await self._open()
        self.by_client[writer.get_extra_info("peername")[1]] = name
        try:
            await until_one_ends(_pump(reader, back), _pump(there, writer))
        finally:
            back.transport.abort()
            await _flushed(writer)

    async def _open(self) -> tuple[str, asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the next backend that accepts. Raises TimeoutError if none does for a while."""
        names = list(self._backends)
        async with asyncio.timeout(_MAX_SECONDS):
            while True:
                self._turn += 1
                name = names[self._turn % len(names)]
                host, _, port = self._backends[name].rpartition(":")
                with suppress(OSError):
                    return name, *await asyncio.open_connection(host, int(port))
                await asyncio.sleep(_RETRY_SECONDS)


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
async def running_balancer(backends: Mapping[str, str]) -> AsyncIterator[Balancer]:
    """Run a balancer on a free port of this machine."""
    balancer = Balancer(backends)
    server = await asyncio.start_server(balancer.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    balancer.address = f"{host}:{port}"
    try:
        yield balancer
    finally:
        server.close()
        await balancer.stop()
