"""Clients that misbehave, over plain sockets of this machine."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from serving.http_connections import HttpLimits
from serving.http_server import HttpServer, start_http
from serving.penalties import Penalties

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
BIG = 32 * 2**20


class Pages:
    """``/`` answers "hello", ``/big`` far more than the system buffers, ``/slow`` once ``release`` is set."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.num_slow = 0

    def app(self) -> web.Application:
        """An application of these pages."""
        app = web.Application(client_max_size=2**20)
        app.router.add_get("/", self._hello)
        app.router.add_get("/big", self._big)
        app.router.add_get("/slow", self._slow)
        app.router.add_post("/", self._read)
        return app

    async def _hello(self, _: web.Request) -> web.Response:
        return web.Response(text="hello")

    async def _big(self, _: web.Request) -> web.Response:
        return web.Response(body=bytes(BIG))

    async def _slow(self, _: web.Request) -> web.Response:
        self.num_slow += 1
        await self.release.wait()
        return web.Response(text="slow")

    async def _read(self, request: web.Request) -> web.Response:
        return web.Response(text=str(len(await request.read())))


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, address: str) -> "Client":
        """Connect, with a small receive buffer, so that unread bytes stay with the server."""
        own = socket.socket()
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        own.setblocking(False)
        host, _, port = address.rpartition(":")
        await asyncio.get_running_loop().sock_connect(own, (host, int(port)))
        return cls(*await asyncio.open_connection(sock=own, limit=4096))

    def send(self, data: bytes) -> None:
        """Send; never waits."""
        self._writer.write(data)

    async def read_head(self) -> bytes:
        """Block until the headers of an answer have arrived; empty if the connection ends before."""
        try:
            async with asyncio.timeout(20):
                return await self._reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return b""

    async def read_exactly(self, count: int) -> bytes:
        """Block until this number of bytes has arrived."""
        async with asyncio.timeout(20):
            return await self._reader.readexactly(count)

    async def ended(self) -> bytes:
        """Block until the server closes; return the bytes received before."""
        found = b""
        try:
            async with asyncio.timeout(20):
                while piece := await self._reader.read(65536):
                    found += piece
        except ConnectionError:
            pass
        return found

    async def close(self) -> None:
        """Close."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


class Door:
    """A server and its clients, which are closed together."""

    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self._clients: list[Client] = []

    @property
    def num_open(self) -> int:
        """The number of open connections of the server."""
        return len(self.server.connections)

    async def connect(self, sent: bytes = b"") -> Client:
        """Open another connection and send this."""
        client = await Client.connect(self.server.address)
        self._clients.append(client)
        client.send(sent)
        return client

    async def until_empty(self) -> None:
        """Block until the server holds no connection."""
        async with asyncio.timeout(20):
            while self.num_open:
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        """Close all clients, then the server."""
        for client in self._clients:
            await client.close()
        await self.server.close()


@asynccontextmanager
async def serving(
    pages: Pages,
    limits: HttpLimits,
    tls: ssl.SSLContext | None = None,
    penalties: Penalties | None = None,
) -> AsyncIterator[Door]:
    """Run a server of these pages."""
    app = pages.app()
    server = await start_http(
        app, "127.0.0.1:0", shutdown_timeout_seconds=0.1, limits=limits, tls=tls, penalties=penalties
    )
    door = Door(server)
    try:
        yield door
    finally:
        await door.close()
