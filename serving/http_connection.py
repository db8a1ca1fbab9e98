"""One HTTP connection with bounds on what its client can make it hold, and for how long."""

import asyncio
import fcntl
import socket
import struct
import termios
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

from aiohttp import http_exceptions, web

from contract.errors import InvalidRequestError
from serving.errors import openai_error
from serving.http_connections import Connections, HttpLimits

_ACKED_END = 128
"""Where ``tcpi_bytes_acked``, eight bytes, ends in Linux's ``struct tcp_info``."""
_LINGER_SECONDS = 5.0


class _Phase(Enum):
    HEADERS = auto()
    """A request has begun (or the connection has), and its headers are not complete."""
    HANDLING = auto()
    WRITING = auto()
    """An answer is on its way; it may outlast its handler."""
    IDLE = auto()


class HttpConnection(web.RequestHandler):
    """aiohttp's connection with deadlines: for headers, between requests, and for a client that does not read.

    A deadline that passes aborts the connection: nothing waits for its client to take the rest of an answer.
    """

    def __init__(self, server: web.Server, book: Connections, limits: HttpLimits, **options: Any) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=limits.idle_seconds,
            lingering_time=_LINGER_SECONDS,
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
        """Whether it has been opened (after the TLS handshake) and not been lost."""
        return self._wire is not None

    def call_to_abort(self, call: Callable[[], object]) -> None:
        """Set what ends the connection before it is open."""
        self._stop_opening = call

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for bytes of its client that have not arrived."""
        is_answering = self._phase is _Phase.HANDLING and (
            self._request is None or self._request.content.is_eof()
        )
        return not is_answering and not self._has_unread_bytes()

    def abort(self) -> None:
        """Close now and drop what has not been sent."""
        self._stop_timer()
        if self._wire is not None:
            self._wire.abort()
        else:
            self._stop_opening()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin with the first request's headers."""
        assert isinstance(transport, asyncio.Transport)
        self._wire = transport
        super().connection_made(transport)
        self._enter(_Phase.HEADERS, self._limits.header_seconds)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Give up its place."""
        self._book.remove(self)
        super().connection_lost(exc)
        self._wire = None
        self._request = None
        self._stop_timer()

    def data_received(self, data: bytes) -> None:
        """Parse; headers that are too long, in bytes or in time, end the connection."""
        if self._phase is _Phase.IDLE:
            self._enter(_Phase.HEADERS, self._limits.header_seconds)
        super().data_received(data)
        if self._request_count == self._num_answered:
            self._num_header_bytes += len(data)
            if self._num_header_bytes > self._limits.max_header_bytes:
                self.logger.warning("the headers of a request from %s are too long", self._remote)
                self.abort()

    def begin(self, request: web.BaseRequest) -> None:
        """Note that the headers are complete; called before the request's handler."""
        self._request = request
        self._book.begin(self)
        self._enter(_Phase.HANDLING, None)
        if request.content.is_eof():
            self._book.work(self)
        else:
            self._book.wait(self)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Write what the handler left to write; a client that takes nothing for too long loses the connection."""
        self._num_header_bytes = 0
        self._num_answered += 1
        self._watch_writing()
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self._request = None
            self._book.end(self)
            if self._num_unsent():
                self._watch_writing()
            elif self._wire is not None:
                self._enter(_Phase.IDLE, self._limits.idle_seconds)
            self._book.wait(self)

    def force_close(self) -> None:
        """Close; what has not been sent goes out first, if the client takes it."""
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
        """Answer what is no HTTP without a byte of what the client wrote: it may hold an API key."""
        if not isinstance(exc, http_exceptions.HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        what = type(exc).__name__
        self.logger.warning("Error handling request from %s: %s", request.remote, what)
        error = InvalidRequestError(f"the request is not valid HTTP ({what})")
        response = web.json_response(openai_error(error), status=status)
        response.force_close()
        return response

    @property
    def _remote(self) -> str:
        return str(self.peername[0]) if self.peername else "a client that has gone"

    def _enter(self, phase: _Phase, seconds: float | None) -> None:
        self._phase = phase
        self._stop_timer()
        if seconds is not None:
            self._timer = self._loop.call_later(seconds, self._on_deadline)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch_writing(self) -> None:
        self._progress = self._measured()
        self._enter(_Phase.WRITING, self._limits.stall_seconds)

    def _on_deadline(self) -> None:
        if self._phase is not _Phase.WRITING:
            self.abort()
        elif self._request is None and not self._num_unsent():
            self._enter(_Phase.IDLE, self._limits.idle_seconds)
        elif self._measured() != self._progress:
            self._watch_writing()
        else:
            self.logger.warning("%s has read nothing for %g s", self._remote, self._limits.stall_seconds)
            self.abort()

    def _num_unsent(self) -> int:
        return 0 if self._wire is None else self._wire.get_write_buffer_size()

    def _measured(self) -> tuple[int, int]:
        """What changes while the client reads: bytes that wait here, and bytes that it has acknowledged."""
        return self._num_unsent(), _num_acknowledged(self._socket())

    def _has_unread_bytes(self) -> bool:
        if (own := self._socket()) is None:
            return False
        try:
            (count,) = struct.unpack("i", fcntl.ioctl(own.fileno(), termios.FIONREAD, bytes(4)))
        except OSError:
            return False
        return bool(count)

    def _socket(self) -> socket.socket | None:
        return None if self._wire is None else self._wire.get_extra_info("socket")


def _num_acknowledged(own: socket.socket | None) -> int:
    """Bytes that the peer's system has taken; 0 where the system does not count them."""
    option = getattr(socket, "TCP_INFO", None)
    if own is None or option is None:
        return 0
    try:
        info = own.getsockopt(socket.IPPROTO_TCP, option, _ACKED_END)
    except OSError:
        return 0
    return struct.unpack_from("Q", info, _ACKED_END - 8)[0] if len(info) == _ACKED_END else 0
