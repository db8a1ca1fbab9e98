"""Starts HTTP servers, whose connections limit the memory and time that their clients can use."""

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any, cast

from aiohttp import http_exceptions, web
from yarl import URL

from contract.addresses import join_address, split_address, unix_path
from contract.errors import InvalidRequestError, SettingError
from serving.errors import openai_error
from serving.http_acceptor import HttpAcceptor, listen, listen_at_path
from serving.http_connections import Connections, HttpLimits, has_unread_bytes, num_acknowledged
from serving.penalties import Penalties

_Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
_LINGER_SECONDS = 5.0
# A transport with nothing unsent takes these without pausing, which it does at 64 KiB.
_SMALL_BYTES = 2**14


class _Phase(Enum):
    HEADERS = auto()
    """The headers of a new connection or request are not complete."""
    HANDLING = auto()
    WRITING = auto()
    """An answer is being sent, perhaps after its handler has returned."""
    IDLE = auto()


class HttpConnection(web.RequestHandler):
    """aiohttp's connection with deadlines for headers, between requests, and for clients that do not read.

    A missed deadline aborts the connection; the rest of an answer is dropped.
    """

    def __init__(self, server: web.Server, book: Connections, limits: HttpLimits, **options: Any) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=limits.idle_seconds,
            lingering_time=_LINGER_SECONDS,
            tcp_keepalive=False,  # the listening socket sets it for all connections
            auto_decompress=False,
            **options,
        )
        self._book = book
        self._limits = limits
        self._phase = _Phase.HEADERS
        self._request: web.BaseRequest | None = None
        self._wire: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._progress = (0, 0)
        self._num_header_bytes = 0
        self._num_answered = 0
        self._stop_opening: Callable[[], object] = lambda: None

    @property
    def is_open(self) -> bool:
        """True from the end of the TLS handshake until the connection is lost."""
        return self._wire is not None

    def call_to_abort(self, call: Callable[[], object]) -> None:
        """Set the function that aborts the connection before it is open."""
        self._stop_opening = call

    @property
    def is_waiting(self) -> bool:
        """True if it waits for bytes of its client that have not arrived."""
        is_answering = self._phase is _Phase.HANDLING and (
            self._request is None or self._request.content.is_eof()
        )
        return not is_answering and not has_unread_bytes(self._socket())

    def abort(self) -> None:
        """Close at once and drop unsent bytes."""
        self._stop_timer()
        if self._wire is not None:
            self._wire.abort()
        else:
            self._stop_opening()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin with the first request's headers."""
        self._wire = cast(asyncio.Transport, transport)  # uvloop's has its methods, and another base
        self._keepalive_timeout = 0.0  # aiohttp sets no timer before the first request: its headers have one
        super().connection_made(transport)
        self._keepalive_timeout = self._limits.idle_seconds
        self._enter(_Phase.HEADERS, self._limits.header_seconds)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Release the connection's place."""
        if not self._num_answered:
            self._book.note_useless(self.peername)
        self._book.remove(self)
        super().connection_lost(exc)
        self._wire = None
        self._request = None
        self._stop_timer()

    def data_received(self, data: bytes) -> None:
        """Parse the bytes; headers above the size or time limit end the connection."""
        if self._phase is _Phase.IDLE:
            self._enter(_Phase.HEADERS, self._limits.header_seconds)
        super().data_received(data)
        # aiohttp counts a request when its headers are complete: until then all bytes are of the headers of one request.
        if self._request_count == self._num_answered:
            self._num_header_bytes += len(data)
            if self._num_header_bytes > self._limits.max_header_bytes:
                self.logger.warning("the headers of a request from %s are too long", self._remote)
                self.abort()

    def begin(self, request: web.BaseRequest) -> None:
        """Note that the headers are complete; called before the request's handler."""
        self._request = request
        self._book.answering.begin(self)
        self._enter(_Phase.HANDLING, None)
        if request.content.is_eof():
            self._book.work(self)
        else:
            self._book.wait(self)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Write the rest of the answer; close the connection if its client reads nothing for too long."""
        self._num_header_bytes = 0
        self._num_answered += 1
        length = resp.content_length if isinstance(resp, web.Response) else None
        # A connection with nothing unsent takes a small response at once, so that no client can delay it.
        if self._num_unsent() or length is None or length > _SMALL_BYTES:
            self._watch_writing()
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self._request = None
            self._book.answering.end(self)
            if self._num_unsent():
                self._watch_writing()
                self._loop.call_soon(self.rest_if_sent)  # uvloop sends at the end of a turn
            elif self._wire is not None:  # aiohttp closes a connection that is not kept
                self._enter(_Phase.IDLE, self._limits.idle_seconds if resp.keep_alive else None)
            self._book.wait(self)

    def force_close(self) -> None:
        """Close after unsent bytes are sent, if the client reads them."""
        super().force_close()
        if self._num_unsent():
            self._watch_writing()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer invalid HTTP without quoting it, since it may contain an API key."""
        if not isinstance(exc, http_exceptions.HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        self._book.note_useless(self.peername)
        what = type(exc).__name__
        self.logger.warning("Error handling request from %s: %s", request.remote, what)
        error = InvalidRequestError(f"the request is not valid HTTP ({what})")
        response = web.json_response(openai_error(error), status=status)
        response.force_close()
        return response

    @property
    def _remote(self) -> str:
        return str(self.peername[0]) if self.peername else "a disconnected client"

    def _enter(self, phase: _Phase, seconds: float | None) -> None:
        self._phase = phase
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self._loop.call_later(seconds, self._on_deadline)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch_writing(self) -> None:
        self._progress = self._measured()
        self._enter(_Phase.WRITING, self._limits.stall_seconds)

    def rest_if_sent(self) -> bool:
        """Begin to wait for the next request if the answer is sent; return whether it is."""
        is_writing = self._phase is _Phase.WRITING and self._wire is not None
        if not is_writing or self._request is not None or self._num_unsent():
            return False
        self._enter(_Phase.IDLE, self._limits.idle_seconds)
        return True

    def _on_deadline(self) -> None:
        if self._phase is not _Phase.WRITING:
            self.abort()
        elif self.rest_if_sent():
            return
        # The client has read something within the time: it gets the whole time again.
        elif self._measured() != self._progress:
            self._watch_writing()
        else:
            self.logger.warning("%s has read nothing for %g s", self._remote, self._limits.stall_seconds)
            self.abort()

    def _num_unsent(self) -> int:
        return 0 if self._wire is None else self._wire.get_write_buffer_size()

    def _measured(self) -> tuple[int, int]:
        """Return values that change while the client reads: unsent bytes, and acknowledged bytes."""
        # The kernel may take a whole answer at once: only acknowledged bytes show whether the client reads.
        return self._num_unsent(), num_acknowledged(self._socket())

    def _socket(self) -> socket.socket | None:
        return None if self._wire is None else self._wire.get_extra_info("socket")


@dataclass(frozen=True)
class HttpServer:
    """A listening aiohttp application. address: the actual "host:port", or "unix:/path". connections: those of clients."""

    address: str
    runner: web.AppRunner
    acceptor: HttpAcceptor
    connections: Connections

    async def until_answered(self) -> None:
        """Block until no request is being answered."""
        await self.connections.answering.is_idle.wait()

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
    penalties: Penalties | None = None,
) -> HttpServer:
    """Listen on ``address`` (port 0 picks a free one), or at the path of a Unix socket.

    handler_cancellation: a client that disconnects cancels its handler; always passed, since aiohttp's runners differ in
    their default. tls: serve HTTPS. limits: those of clients. is_shared: other processes of this user may listen on the same
    port. root_path: stands before the path of requests that a reverse proxy passes on unchanged. penalties: of addresses
    that waste time; those of this server alone if None.

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
    book = Connections(
        limits.max_connections,
        limits.max_per_address,
        penalties=penalties or Penalties(has_tls=tls is not None),
    )
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
