"""The listener of a public gRPC port, in front of gRPC's own server, which listens on a private Unix socket.

The front accepts and bounds connections as the HTTP port does, ends TLS, and counts the frames that clients send (ADR 0033).
What is within the limits is passed to gRPC's server, and the answers back. To gRPC, a client's name is the path of the
socket that the front connects with, whose last part is the client's address.
"""

import asyncio
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, Protocol, cast

import grpc.aio

from contract.addresses import join_address, split_address
from contract.errors import SettingError
from contract.processes import RunFolder
from serving.http2_frames import Code, goaway
from serving.http2_limits import ClientFrames, FrameLimitError
from serving.http_acceptor import HttpAcceptor, listen
from serving.http_connections import Connections, HttpLimits, address_of, has_unread_bytes
from serving.penalties import CALL_SECONDS, Penalties, Probation

# As long as a client's longest name: a folder whose path is too long for one is rejected at the start.
_INNER_NAME = "server".ljust(59, "-")
logger = logging.getLogger(__name__)

# For a client to take the last bytes of a connection that the server has closed.
_CLOSE_SECONDS = 5.0


class Opener(Protocol):
    """Connects to gRPC's server."""

    def __call__(self, name: object) -> socket.socket:
        """Return a connected socket whose name in gRPC is that of the client. Raises OSError."""


class GrpcConnection(asyncio.Protocol):
    """The client's side, which owns the server's side. gRPC sees nothing of a client before its HTTP/2 preface is complete.

    The connection ends when a frame breaks a limit, and when a header block, or the connection's first frame, is not
    complete in time. Until the server accepts a call, what the client does counts as wasted time of its address; if the
    address has wasted much, its bytes wait for their turn. connect: called with the client's socket name.
    """

    def __init__(self, book: Connections, limits: HttpLimits, connect: Opener) -> None:
        self._book = book
        self._limits = limits
        self._frames = ClientFrames()
        self._server = _ServerSide(self, connect)
        self._wire: asyncio.Transport | None = None
        self._has_calls = False
        self._probation: Probation | None = None
        # Set while bytes of the client wait for their turn; nothing is read then, so that they stay in order.
        self._turn: asyncio.Task[None] | None = None
        self._deadline: tuple[int, asyncio.TimerHandle] | None = None
        self._stop_opening: Callable[[], object] = lambda: None

    @property
    def is_open(self) -> bool:
        """True from the end of the TLS handshake until the connection is lost."""
        return self._wire is not None

    @property
    def is_waiting(self) -> bool:
        """True if it has no open call, and no bytes of its client have arrived."""
        own = None if self._wire is None else self._wire.get_extra_info("socket")
        return not self._frames.calls and not has_unread_bytes(own)

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
        address = address_of(self._wire.get_extra_info("peername") or "")
        self._probation = Probation(self._book.penalties, address)
        self._watch_headers()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Release the connection's place, and end its calls."""
        self._book.remove(self)
        if self._turn is not None:
            self._turn.cancel()
        self._wire = None
        if self._deadline is not None:
            self._deadline[1].cancel()
        self._server.abort()

    def data_received(self, data: bytes) -> None:
        """Pass the bytes on if their frames are within the limits; otherwise end the connection."""
        if self._is_within_limits(data):
            self._watch_headers()
            self._note_calls()
            if self._probation and self._probation.is_due:
                self.pause_reading()
                later = self._pass_later(self._probation, data)
                self._turn = asyncio.create_task(later, name="pass on a client's bytes in their turn")
            else:
                self._server.send(data, is_open=self._frames.has_preface, name=self._name())

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
        self._frames.answered.feed(data)
        if self._frames.calls.has_accepted and self._probation:
            self._probation.end()
        if self._wire is not None:
            self._wire.write(data)
        self._note_calls()

    def pause_reading(self) -> None:
        """Leave the client's bytes, which gRPC's server does not read, in its connection."""
        if self._wire is not None and not self._wire.is_closing():
            self._wire.pause_reading()

    def resume_reading(self) -> None:
        """Take bytes of the client again."""
        if self._wire is not None and not self._wire.is_closing() and self._turn is None:
            self._wire.resume_reading()

    def finish(self) -> None:
        """Close after unsent bytes are sent, if the client reads them soon."""
        if self._wire is not None:
            self._wire.close()
            asyncio.get_running_loop().call_later(_CLOSE_SECONDS, self.abort)

    def _is_within_limits(self, data: bytes) -> bool:
        """Count the client's bytes; otherwise end the connection."""
        began = time.perf_counter()
        num_calls = self._frames.calls.num_begun
        try:
            self._frames.read_sent(data)
        except FrameLimitError as error:
            self._refuse(error)
            return False
        finally:
            if self._probation:
                calls = self._frames.calls.num_begun - num_calls
                self._probation.note(time.perf_counter() - began + calls * CALL_SECONDS)
        return True

    async def _pass_later(self, probation: Probation, data: bytes) -> None:
        await probation.until_turn()
        self._turn = None
        self.resume_reading()
        self._server.send(data, is_open=self._frames.has_preface, name=self._name())

    def _note_calls(self) -> None:
        """Record whether the connection has calls: one without is evicted if there is no room for a new one."""
        has_calls = len(self._frames.calls) > 0
        if has_calls != self._has_calls:
            self._has_calls = has_calls
            (self._book.work if has_calls else self._book.wait)(self)

    def _watch_headers(self) -> None:
        """Set a deadline for a header block that has not ended, and none while there is no such block."""
        number = self._frames.num_blocks if self._frames.is_in_headers else None
        if self._deadline is not None:
            # The same block: its deadline stays, however slowly its bytes arrive.
            if number == self._deadline[0]:
                return
            self._deadline[1].cancel()
            self._deadline = None
        if number is not None:
            timer = asyncio.get_running_loop().call_later(self._limits.header_seconds, self._on_late)
            self._deadline = (number, timer)

    def _on_late(self) -> None:
        seconds = self._limits.header_seconds
        self._refuse(
            FrameLimitError(Code.ENHANCE_YOUR_CALM, f"headers were not complete after {seconds:g} s"),
            # Before its preface a client may be a port scan, or a check of a load balancer.
            is_logged=self._frames.has_preface,
        )

    def _refuse(self, error: FrameLimitError, *, is_logged: bool = True) -> None:
        """End the connection, and send the reason if that does not have to wait."""
        if self._wire is None:
            return
        if self._probation:
            self._probation.fail()
        if is_logged:
            client, *_ = self._name() or ("a disconnected client",)
            logger.warning("closed a gRPC connection of %s: %s", client, error.reason)
        # A frame within another one would make no sense to the client, and one behind unsent bytes would have to wait.
        if self._frames.answered.is_between_frames and not self._wire.get_write_buffer_size():
            self._wire.write(goaway(error.code, error.reason))
            self.finish()
        else:
            self._wire.abort()
        self._server.abort()

    def _name(self) -> Any:
        return self._wire.get_extra_info("peername") if self._wire else None


class _ServerSide(asyncio.Protocol):
    """The connection to gRPC's server. Bytes that are sent before it is open wait, within what is read in one piece."""

    def __init__(self, client: GrpcConnection, connect: Opener) -> None:
        self._client = client
        self._connect = connect
        self._opening: asyncio.Task[None] | None = None
        self._wire: asyncio.Transport | None = None
        self._waiting = bytearray()
        self._is_over = False

    async def _open(self, name: object) -> None:
        try:
            connected = self._connect(name)
            await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=connected)
        except OSError as error:
            self._client.refuse(f"no connection to gRPC's server can be made: {error.strerror or error}")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._wire = cast(asyncio.Transport, transport)
        # The client left while this connection was being made.
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

    def send(self, data: bytes, *, is_open: bool, name: object) -> None:
        """Write, or keep what is sent until the connection is open.

        is_open: the client has shown that it speaks HTTP/2, so a connection is made for it. name: that of its socket.
        """
        if self._wire is not None:
            self._wire.write(data)
        elif not self._is_over:
            self._waiting += data
            if is_open and self._opening is None:
                self._client.pause_reading()
                self._opening = asyncio.create_task(self._open(name), name="connect a client to gRPC")

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


class GrpcFront:
    """Owns the listening sockets and the folder of the Unix socket, from ``start_front`` until ``close``."""

    def __init__(
        self,
        sockets: list[socket.socket],
        limits: HttpLimits,
        tls: ssl.SSLContext | None,
        penalties: Penalties | None = None,
    ) -> None:
        self._folder = RunFolder("front")
        self._inner = os.fspath(self._folder.path / _INNER_NAME)
        self.connections = Connections(
            limits.max_connections,
            limits.max_per_address,
            penalties=penalties or Penalties(has_tls=tls is not None),
        )

        def make() -> GrpcConnection:
            return GrpcConnection(self.connections, limits, self._connect)

        self._acceptor = HttpAcceptor(sockets, make, self.connections, limits, tls, refusal=b"")

    @property
    def inner_address(self) -> str:
        """The address of gRPC's server."""
        return f"unix:{self._inner}"

    @property
    def port(self) -> int:
        """The port that clients connect to."""
        return self._acceptor.port

    def start(self) -> None:
        """Begin to accept."""
        self._acceptor.start()

    def stop_listening(self) -> None:
        """Accept no further connection; open ones continue."""
        self._acceptor.stop_listening()

    def close(self) -> None:
        """Stop listening, close open connections and remove the folder."""
        self._acceptor.close()
        self.connections.abort_all()
        self._folder.close()

    def _connect(self, name: object) -> socket.socket:
        own = self._folder.path / _named(name)
        connected = socket.socket(socket.AF_UNIX)
        try:
            connected.setblocking(False)
            connected.bind(os.fspath(own))
            own.unlink()  # the name stays, and the next client of this address may have it
            connected.connect(self._inner)
        except OSError:
            connected.close()
            raise
        return connected


async def start_front(
    server: grpc.aio.Server,
    address: str,
    *,
    param: str,
    limits: HttpLimits,
    tls: ssl.SSLContext | None = None,
    is_shared: bool = False,
    penalties: Penalties | None = None,
) -> tuple[GrpcFront, str]:
    """Start the server behind a front on "host:port" (port 0 picks a free one); return the front and its real address.

    is_shared: other processes of this user may listen on the same port. penalties: of addresses that waste time; those of
    this port alone if None. Raises SettingError that names ``param`` when the address cannot be bound.
    """
    host, port = split_address(address)
    try:
        sockets = await listen(host, port, is_shared=is_shared)
    except OSError as error:
        raise SettingError(
            f"{param} is {address}: cannot listen there, {error.strerror or error}", param=param
        ) from error
    front = GrpcFront(sockets, limits, tls, penalties)
    try:
        server.add_insecure_port(front.inner_address)
    except RuntimeError as error:
        front.close()
        raise SettingError(
            f"the gRPC server's socket cannot be made at {front.inner_address}: {error}; "
            "set TMPDIR to another (shorter) folder",
            param="TMPDIR",
        ) from error
    await server.start()
    front.start()
    return front, join_address(host, front.port)


def _named(name: object) -> str:
    """Return gRPC's name of a TCP peer: "ipv4:127.0.0.1:50000" or "ipv6:[::1]:50000"."""
    assert isinstance(name, tuple)
    kind = "ipv6" if ":" in name[0] else "ipv4"
    return f"{kind}:{join_address(name[0], name[1])}"
