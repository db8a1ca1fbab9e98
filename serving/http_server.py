"""Starts HTTP servers."""

import errno
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web
from yarl import URL

from contract.addresses import join_address, split_address, unix_path
from contract.errors import SettingError
from serving.http_acceptor import HttpAcceptor, listen, listen_at_path
from serving.http_connection import HttpConnection
from serving.http_connections import Connections, HttpLimits

_Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class HttpServer:
    """A listening aiohttp application. address: the actual "host:port", or "unix:/path". connections: those of clients."""

    address: str
    runner: web.AppRunner
    acceptor: HttpAcceptor
    connections: Connections

    async def until_answered(self) -> None:
        """Block until no request is being answered."""
        await self.connections.until_answered()

    def stop_listening(self) -> None:
        """Accept no further connection; open ones continue."""
        self.acceptor.stop_listening()
        if path := unix_path(self.address):
            Path(path).unlink(missing_ok=True)

    async def close(self) -> None:
        """Stop listening, end open connections, run the application's clean-up."""
        self.stop_listening()
        self.acceptor.close()
        await self.runner.cleanup()


async def start_http(
    app: web.Application,
    address: str,
    *,
    param: str = "http",
    handler_cancellation: bool = True,
    shutdown_timeout_seconds: float = 5.0,
    tls: ssl.SSLContext | None = None,
    limits: HttpLimits | None = None,
    is_shared: bool = False,
    root_path: str = "",
) -> HttpServer:
    """Listen on ``address`` (port 0 picks a free one), or at the path of a Unix socket.

    handler_cancellation: a client that disconnects cancels its handler; always passed, since aiohttp's runners differ in
    their default. tls: serve HTTPS. limits: those of clients. is_shared: other processes of this user may listen on the same
    port. root_path: stands before the path of requests that a reverse proxy passes on unchanged.

    Raises SettingError, which names the setting ``param``, if the address cannot be bound.
    """
    limits = limits or HttpLimits()
    runner = web.AppRunner(
        app, handler_cancellation=handler_cancellation, shutdown_timeout=shutdown_timeout_seconds
    )
    await runner.setup()
    server = runner.server
    assert server is not None  # it is made by setup
    try:
        sockets = await _sockets(address, is_shared)
    except OSError as error:
        await runner.cleanup()
        raise SettingError(
            f"{param} is {address}: cannot listen there, {error.strerror or error}", param=param
        ) from error
    server.request_handler = _noting_begin(server.request_handler)
    if root_path:
        server.request_factory = _below(root_path, server.request_factory)
    book = Connections(limits.max_connections, limits.max_per_address)
    logger = logging.getLogger(f"{__name__}.aiohttp")

    def make() -> HttpConnection:
        return HttpConnection(server, book, limits, logger=logger, access_log=None)

    acceptor = HttpAcceptor(sockets, make, book, limits, tls)
    acceptor.start()
    if unix_path(address) is None:
        address = join_address(split_address(address)[0], acceptor.port)
    return HttpServer(address, runner, acceptor, book)


async def _sockets(address: str, is_shared: bool) -> list[socket.socket]:
    """Return the listening sockets of an address. Raises OSError."""
    if path := unix_path(address):
        if is_shared:
            raise OSError(errno.EINVAL, "routers cannot share a Unix socket")
        return [listen_at_path(path)]
    return await listen(*split_address(address), is_shared=is_shared)


def _below(root_path: str, make: Callable[..., web.BaseRequest]) -> Callable[..., web.BaseRequest]:
    """Wrap a maker of requests to remove ``root_path`` from the beginning of their paths."""

    def without(message: Any, *others: Any) -> web.BaseRequest:
        rest = message.path.removeprefix(root_path)
        if rest != message.path and rest[:1] in ("", "/", "?"):
            path, _, query = rest.partition("?")
            url = URL.build(path="/" + path.lstrip("/"), query_string=query, encoded=True)
            message = message._replace(path=str(url), url=url)
        return make(message, *others)

    return without


def _noting_begin(handler: _Handler) -> _Handler:
    """Wrap a handler to record on a request's connection that the request begins."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if isinstance(request.protocol, HttpConnection):
            request.protocol.begin(request)
        return await handler(request)

    return handle
