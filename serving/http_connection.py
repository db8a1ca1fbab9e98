"""One HTTP connection with limits on the memory and time that its client can use."""

import asyncio
import socket
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, cast

from aiohttp import http_exceptions, web

from contract.errors import InvalidRequestError
from serving.errors import openai_error
from serving.http_connections import Connections, HttpLimits
from serving.tcp_progress import has_unread_bytes, num_acknowledged

_LINGER_SECONDS = 5.0
_SMALL_BYTES = 2**14
"""Bytes that a transport with nothing unsent takes without pausing, which it does at 64 KiB."""


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
        """Write the rest of the answer; close the connection if its client reads nothing for too long."""
        self._num_header_bytes = 0
        self._num_answered += 1
        if self._num_unsent() or not _is_small(resp):
            self._watch_writing()
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            self._request = None
            self._book.end(self)
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
        elif self._measured() != self._progress:
            self._watch_writing()
        else:
            self.logger.warning("%s has read nothing for %g s", self._remote, self._limits.stall_seconds)
            self.abort()

    def _num_unsent(self) -> int:
        return 0 if self._wire is None else self._wire.get_write_buffer_size()

    def _measured(self) -> tuple[int, int]:
        """Return values that change while the client reads: unsent bytes, and acknowledged bytes."""
        return self._num_unsent(), num_acknowledged(self._socket())

    def _socket(self) -> socket.socket | None:
        return None if self._wire is None else self._wire.get_extra_info("socket")


def _is_small(response: web.StreamResponse) -> bool:
    """Return True if a connection with nothing unsent takes the response at once, so that no client can delay it."""
    length = response.content_length if isinstance(response, web.Response) else None
    return length is not None and length <= _SMALL_BYTES
