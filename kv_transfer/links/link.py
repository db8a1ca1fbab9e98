"""One control link: a non-blocking socket, its handshake, and its frames in both directions.

A link belongs to the I/O thread. Other threads may use only its outbox.
"""

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple, Protocol

from contract.errors import KvbatonError, PeerUnreachableError, TransferError
from kv_transfer.links.framing import FrameBuffer, encode_frame
from kv_transfer.protocol.handshake import Accepting, Dialing, PeerTarget, Session
from kv_transfer.protocol.messages import MAX_HANDSHAKE_BYTES, Message, decode_message

_READ_BYTES = 262144
# Of the largest size: a peer that does not read must not take this worker's memory.
_MAX_WAITING_FRAMES = 8
_PINGS_PER_TIMEOUT = 3


class PeerRef(NamedTuple):
    """The name of a link: the peer's boot id, and which side dialed (two workers may hold one link each way)."""

    boot_id: str
    is_dialed: bool


class LinkEvents(Protocol):
    """The reports of the I/O thread to the control half; called in that thread only."""

    def link_up(self, ref: PeerRef, session: Session, resume: Callable[[], None]) -> bool:
        """Take the session of a handshake that is complete.

        False: nothing may be sent, not even the end of the handshake, before ``resume`` is called, in any thread.
        """

    def link_message(self, ref: PeerRef, message: Message) -> None:
        """Act on a message that arrived after the handshake."""

    def link_down(self, ref: PeerRef, session: Session | None, error: KvbatonError) -> None:
        """Act on the end of a link that was up or was dialed; ``error`` is the reason."""

    def tick(self, now: float) -> float:
        """Act on the deadlines that have passed; return the next one, inf if there is none."""

    def thread_failed(self, thread: str, error: BaseException) -> None:
        """End this worker: the I/O thread has ended because of a bug."""


class Outbox:
    """The bytes that wait to be sent on one socket. Thread-safe.

    is_held: not every rank has the link's session yet: meanwhile nothing is sent.
    """

    def __init__(self, sock: socket.socket, max_frame_bytes: int, now: float) -> None:
        self.is_open = False
        self.is_held = False
        self.sent_at = now
        self._sock = sock
        self._max_frame_bytes = max_frame_bytes
        self._lock = threading.Lock()
        self._bytes = bytearray()

    @property
    def wants_write(self) -> bool:
        """True if bytes wait that may be sent."""
        return bool(self._bytes) and not self.is_held

    def add(self, messages: list[Message]) -> None:
        """Append messages. Raises TransferError if too many bytes wait already."""
        with self._lock:
            for message in messages:
                self._append(message)

    def send_now(self, message: Message) -> bool:
        """Send a message behind all others, in the calling thread; what the socket does not take waits (``wants_write``).

        Returns False, having done nothing, if the link is held or not open. Raises TransferError if too many bytes wait.
        """
        with self._lock:
            if not self.is_open or self.is_held:
                return False
            self._append(message)
            with suppress(OSError):  # the I/O thread meets the error too, and ends the link
                self._send(time.monotonic())
            return True

    def flush(self, now: float) -> None:
        """Send as much as the socket takes."""
        with self._lock:
            if not self.is_held:
                self._send(now)

    def open(self) -> None:
        """Allow ``send_now``: the session was reported to the control half."""
        with self._lock:
            self.is_open = True

    def close(self) -> None:
        """Close the socket."""
        with self._lock:
            self.is_open = False
            self._sock.close()

    def _append(self, message: Message) -> None:
        self._bytes += encode_frame(message, self._max_frame_bytes)
        if len(self._bytes) > _MAX_WAITING_FRAMES * self._max_frame_bytes:
            raise TransferError(f"{len(self._bytes)} bytes wait for a peer that does not read them")

    def _send(self, now: float) -> None:
        with suppress(BlockingIOError):
            while self._bytes:
                del self._bytes[: self._sock.send(self._bytes)]
                self.sent_at = now


class Link:
    """One link; owns its socket.

    ref: None until an accepted link's handshake is complete. host: the peer's address on an accepted link.
    """

    def __init__(
        self, sock: socket.socket, handshake: Dialing | Accepting, max_frame_bytes: int, now: float
    ) -> None:
        self.sock = sock
        self.ref: PeerRef | None = None
        self.host = ""
        self.is_connecting = isinstance(handshake, Dialing)
        self.heard_at = now
        self._handshake = handshake
        self._max_frame_bytes = max_frame_bytes
        self._frames = FrameBuffer(MAX_HANDSHAKE_BYTES)
        self.outbox = Outbox(sock, max_frame_bytes, now)
        self._waiting: list[Message] = []
        self.outbox.add(handshake.begin())

    @property
    def session(self) -> Session | None:
        """The session; None until the handshake is complete."""
        return self._handshake.session

    @property
    def target(self) -> PeerTarget | None:
        """The worker that was dialed; None for an accepted link."""
        return self._handshake.target if isinstance(self._handshake, Dialing) else None

    @property
    def worker_id(self) -> str:
        """The peer's worker id, for logs and errors."""
        known = self.session or self.target
        return "(unknown)" if known is None else known.worker_id

    @property
    def has_spoken(self) -> bool:
        """True if the peer's first message was valid."""
        return self._handshake.has_begun

    def ping_at(self, timeout_seconds: float) -> float:
        """Return when an idle link needs a ping, by the shorter of the two sides' timeouts."""
        if self.session is None or self.outbox.wants_write or self.outbox.is_held:
            return math.inf  # bytes that wait to be sent will serve as a ping
        return self.outbox.sent_at + min(timeout_seconds, self.session.timeout_seconds) / _PINGS_PER_TIMEOUT

    def queue(self, message: Message) -> None:
        """Send a message once the handshake is complete. Raises TransferError if too many bytes wait already."""
        if self.session is None:
            self._waiting.append(message)
        else:
            self.outbox.add([message])

    def refuse(self, error: KvbatonError) -> None:
        """Send why the link is refused; what does not fit into the socket's buffer is lost."""
        self.outbox.add([self._handshake.refusal(error)])

    def flush(self, now: float) -> None:
        """Send as much as the socket takes, once it is connected."""
        if not self.is_connecting:
            self.outbox.flush(now)

    def receive(self, now: float) -> Iterator[Message]:
        """Receive what has arrived: answer handshake messages and yield all others. Call it when the socket is ready.

        Raises OSError, PeerUnreachableError (closed), TransferError (malformed) or the error that the handshake fails with.
        """
        if self.is_connecting:
            code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, f"connecting failed: {os.strerror(code)}")
            self.is_connecting = False
        try:
            data = self.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise PeerUnreachableError(f"worker {self.worker_id} closed its control link")
        if self.session is not None:  # before that, the deadline is for the handshake as a whole
            self.heard_at = now
        for frame in self._frames.feed(data):
            message = decode_message(frame)
            if self.session is not None:
                yield message
                continue
            self.outbox.add(self._handshake.receive(message))
            if self._handshake.session is not None:
                self.heard_at = now
                # Only a peer that has proved itself may have this worker keep so many bytes.
                self._frames.max_bytes = self._max_frame_bytes
                self.outbox.add(self._waiting)
                self._waiting.clear()
