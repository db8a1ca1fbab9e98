"""One client's connection to a gRPC port: its frames are counted and passed to gRPC's server, and the answers back."""

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Protocol, cast

from serving.http2_frames import Code, goaway
from serving.http2_limits import ClientFrames, FrameLimitError
from serving.http_connections import Connections, HttpLimits
from serving.tcp_progress import has_unread_bytes

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 5.0
"""Time for a client to take the last bytes of a connection that the server has closed."""


class Opener(Protocol):
    """Connects to gRPC's server."""

    def __call__(self, name: object) -> socket.socket:
        """Return a connected socket whose name in gRPC is that of the client. Raises OSError."""


class GrpcConnection(asyncio.Protocol):
    """The client's side, which owns the server's side. gRPC sees nothing of a client before its HTTP/2 preface is complete.

    The connection ends when a frame breaks a limit, and when a header block, or the connection's first frame, is not
    complete in time. connect: called with the client's socket name.
    """

    def __init__(self, book: Connections, limits: HttpLimits, connect: Opener) -> None:
        self._book = book
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._frames = ClientFrames()
        self._server = _ServerSide(self, connect)
        self._wire: asyncio.Transport | None = None
        self._has_calls = False
        self._deadline: tuple[int, asyncio.TimerHandle] | None = None
        self._stop_opening: Callable[[], object] = lambda: None

    @property
    def is_open(self) -> bool:
        """True from the end of the TLS handshake until the connection is lost."""
        return self._wire is not None

    @property
    def is_waiting(self) -> bool:
        """True if it has no open call, and no bytes of its client have arrived."""
        return not self._frames.num_open and not has_unread_bytes(self._socket())

    def call_to_abort(self, call: Callable[[], object]) -> None:
        """Set the function that aborts the connection before it is open."""
        self._stop_opening = call

    def abort(self) -> None:
        """Close at once and drop unsent bytes."""
        if self._wire is not None:
            self._wire.abort()
        else:
            self._stop_opening()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the client's first frames."""
        self._wire = cast(asyncio.Transport, transport)  # uvloop's has its methods, and another base
        self._watch_headers()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Release the connection's place, and end its calls."""
        self._book.remove(self)
        self._wire = None
        if self._deadline is not None:
            self._deadline[1].cancel()
        self._server.abort()

    def data_received(self, data: bytes) -> None:
        """Pass the bytes on if their frames are within the limits; otherwise end the connection."""
        had_preface = self._frames.has_preface
        try:
            self._frames.read_sent(data)
        except FrameLimitError as error:
            self._refuse(error)
            return
        self._server.send(data)
        if self._frames.has_preface and not had_preface:
            self.pause_reading()
            self._server.open(self._wire.get_extra_info("peername") if self._wire else None)
        self._watch_headers()
        self._note_calls()

    def pause_writing(self) -> None:
        """Leave answers that the client does not read to gRPC's server, which has limits for that."""
        self._server.pause_reading()

    def resume_writing(self) -> None:
        """Take answers again."""
        self._server.resume_reading()

    def refuse(self, reason: str) -> None:
        """End the connection, and send its client the reason."""
        self._refuse(FrameLimitError(Code.ENHANCE_YOUR_CALM, reason))

    def answer(self, data: bytes) -> None:
        """Send what gRPC's server has written."""
        self._frames.read_answered(data)
        if self._wire is not None:
            self._wire.write(data)
        self._note_calls()

    def pause_reading(self) -> None:
        """Leave the client's bytes, which gRPC's server does not read, in its connection."""
        if self._wire is not None and not self._wire.is_closing():
            self._wire.pause_reading()

    def resume_reading(self) -> None:
        """Take bytes of the client again."""
        if self._wire is not None and not self._wire.is_closing():
            self._wire.resume_reading()

    def finish(self) -> None:
        """Close after unsent bytes are sent, if the client reads them soon."""
        if self._wire is not None:
            self._wire.close()
            self._loop.call_later(_CLOSE_SECONDS, self._abort_if_open)

    def _note_calls(self) -> None:
        """Record whether the connection has calls: one without is evicted if there is no room for a new one."""
        has_calls = self._frames.num_open > 0
        if has_calls != self._has_calls:
            self._has_calls = has_calls
            (self._book.work if has_calls else self._book.wait)(self)

    def _abort_if_open(self) -> None:
        if self._wire is not None:
            self._wire.abort()

    def _watch_headers(self) -> None:
        """Set a deadline for a header block that has not ended, and none while there is no such block."""
        number = self._frames.num_blocks if self._frames.is_in_headers else None
        if self._deadline is not None:
            if number == self._deadline[0]:
                return
            self._deadline[1].cancel()
            self._deadline = None
        if number is not None:
            timer = self._loop.call_later(self._limits.header_seconds, self._on_late)
            self._deadline = (number, timer)

    def _on_late(self) -> None:
        seconds = self._limits.header_seconds
        self._refuse(
            FrameLimitError(Code.ENHANCE_YOUR_CALM, f"headers were not complete after {seconds:g} s"),
            is_logged=self._frames.has_preface,
        )

    def _refuse(self, error: FrameLimitError, *, is_logged: bool = True) -> None:
        """End the connection, and send the reason if that does not have to wait."""
        if self._wire is None:
            return
        if is_logged:
            logger.warning("closed a gRPC connection of %s: %s", self._client(), error.reason)
        if self._frames.may_send_goaway and not self._wire.get_write_buffer_size():
            self._wire.write(goaway(error.code, error.reason))
            self.finish()
        else:
            self._wire.abort()
        self._server.abort()

    def _client(self) -> str:
        name = self._wire.get_extra_info("peername") if self._wire else None
        return str(name[0]) if name else "a disconnected client"

    def _socket(self) -> socket.socket | None:
        return None if self._wire is None else self._wire.get_extra_info("socket")


class _ServerSide(asyncio.Protocol):
    """The connection to gRPC's server. Bytes that are sent before it is open wait, within what is read in one piece."""

    def __init__(self, client: GrpcConnection, connect: Opener) -> None:
        self._client = client
        self._connect = connect
        self._opening: asyncio.Task[None] | None = None
        self._wire: asyncio.Transport | None = None
        self._waiting = bytearray()
        self._is_over = False

    def open(self, name: object) -> None:
        """Connect for the client of this socket name; what is sent until then waits."""
        opening = self._open(name)
        self._opening = asyncio.get_running_loop().create_task(opening, name="connect a client to gRPC")

    async def _open(self, name: object) -> None:
        try:
            connected = self._connect(name)
            await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=connected)
        except OSError as error:
            self._client.refuse(f"no connection to gRPC's server can be made: {error.strerror or error}")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._wire = cast(asyncio.Transport, transport)
        if self._is_over:
            self._wire.abort()
            return
        self._client.resume_reading()
        self._wire.write(bytes(self._waiting))
        self._waiting.clear()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._wire = None
        self._client.finish()

    def data_received(self, data: bytes) -> None:
        self._client.answer(data)

    def pause_writing(self) -> None:
        self._client.pause_reading()

    def resume_writing(self) -> None:
        self._client.resume_reading()

    def send(self, data: bytes) -> None:
        """Write, or keep for the time when the connection is open."""
        if self._wire is not None:
            self._wire.write(data)
        elif not self._is_over:
            self._waiting += data

    def pause_reading(self) -> None:
        if self._wire is not None and not self._wire.is_closing():
            self._wire.pause_reading()

    def resume_reading(self) -> None:
        if self._wire is not None and not self._wire.is_closing():
            self._wire.resume_reading()

    def abort(self) -> None:
        self._is_over = True
        self._waiting.clear()
        if self._wire is not None:
            self._wire.abort()
