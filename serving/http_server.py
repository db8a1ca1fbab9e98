"""Starts HTTP servers."""

import logging
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from contract.addresses import join_address, split_address
from contract.errors import SettingError
from serving.http_acceptor import HttpAcceptor, listen
from serving.http_connection import HttpConnection
from serving.http_connections import Connections, HttpLimits

_Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class HttpServer:
    """A listening aiohttp application. address: the actual "host:port". connections: those of clients."""

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

    async def close(self) -> None:
        """Stop listening, end open connections, run the application's clean-up."""
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
) -> HttpServer:
    """Listen on ``address`` (port 0 picks a free one).

    handler_cancellation: a client that disconnects cancels its handler; always passed, since aiohttp's runners differ in
    their default. tls: serve HTTPS. limits: those of clients. is_shared: other processes of this user may listen on the same
    port. Raises SettingError, which names the setting ``param``, if the address cannot be bound.
    """
    host, port = split_address(address)
    limits = limits or HttpLimits()
    runner = web.AppRunner(
        app, handler_cancellation=handler_cancellation, shutdown_timeout=shutdown_timeout_seconds
    )
    await runner.setup()
    server = runner.server
    assert server is not None  # it is made by setup
    try:
        sockets = await listen(host, port, is_shared=is_shared)
    except OSError as error:
        await runner.cleanup()
        raise SettingError(
            f"{param} is {address}: cannot listen there, {error.strerror or error}", param=param
        ) from error
    server.request_handler = _noting_begin(server.request_handler)
    book = Connections(limits.max_connections, limits.max_per_address)
    logger = logging.getLogger(f"{__name__}.aiohttp")

    def make() -> HttpConnection:
        return HttpConnection(server, book, limits, logger=logger, access_log=None)

    acceptor = HttpAcceptor(sockets, make, book, limits, tls)
    acceptor.start()
    return HttpServer(join_address(host, acceptor.port), runner, acceptor, book)


def _noting_begin(handler: _Handler) -> _Handler:
    """Wrap a handler to record on a request's connection that the request begins."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if isinstance(request.protocol, HttpConnection):
            request.protocol.begin(request)
        return await handler(request)

    return handle
