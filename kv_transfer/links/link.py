"""One control link: a non-blocking socket, its handshake, and its frames in both directions.

It belongs to one thread. Only ``send_now`` and ``wants_write`` may be used by others.
"""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from contract.errors import KvbatonError, TransferError
from kv_transfer.links.framing import FrameBuffer, encode_frame
from kv_transfer.protocol.handshake import Accepting, Dialing, PeerTarget, Session
from kv_transfer.protocol.messages import MAX_HANDSHAKE_BYTES, Message, decode_message

_READ_BYTES = 262144
_MAX_WAITING_FRAMES = 8
"""How many frames of the largest size may wait for a peer that does not read."""


class PeerRef(NamedTuple):
    """Which link: the peer's boot id, and whether this side dialed it (a pair of workers may hold one each way)."""

    boot_id: str
    is_dialed: bool


class LinkClosedError(OSError):
    """The peer closed the link."""


class Link:
    """The bytes of one link; owns its socket.

    ref is None until an accepted link's handshake is through. Messages that are queued before wait for its end.
    held_for: the token of a session that is not known everywhere: nothing is sent while that is so.
    """

    def __init__(
        self, sock: socket.socket, handshake: Dialing | Accepting, max_frame_bytes: int, now: float
    ) -> None:
        self.sock = sock
        self.ref: PeerRef | None = None
        self.target: PeerTarget | None = None
        self.is_connecting = False
        self.held_for: str | None = None
        self.heard_at = self.sent_at = now
        self.host = ""
        self._handshake = handshake
        self._max_frame_bytes = max_frame_bytes
        self._frames = FrameBuffer(MAX_HANDSHAKE_BYTES)
        self._outbox_lock = threading.Lock()
        self._outbox = bytearray()
        self._is_open = False
        self._waiting: list[Message] = []
        self._write_all(handshake.begin())

    @property
    def session(self) -> Session | None:
        """Set when the link is up."""
        return self._handshake.session

    @property
    def has_spoken(self) -> bool:
        """Whether the peer's first message was in order."""
        return self._handshake.has_begun

    @property
    def is_up(self) -> bool:
        """The handshake is through."""
        return self._handshake.session is not None

    @property
    def wants_write(self) -> bool:
        """True while bytes wait to be sent (and may be), or the connection to be made."""
        return self.is_connecting or (bool(self._outbox) and self.held_for is None)

    def queue(self, message: Message) -> None:
        """Send a message once the link is up. Raises TransferError when too much waits already."""
        if self.session is None:
            self._waiting.append(message)
        else:
            self._write_all([message])

    def open(self) -> None:
        """The peer is known everywhere: from now on ``send_now`` sends."""
        with self._outbox_lock:
            self._is_open = True

    def close(self) -> None:
        """Close the socket."""
        with self._outbox_lock:
            self._is_open = False
            self.sock.close()

    def send_now(self, message: Message) -> bool:
        """Send a message behind all others, without its thread: what the socket does not take waits in ``wants_write``.

        False: the link is not open (any more), and nothing was done. Raises TransferError when too much waits already.
        """
        with self._outbox_lock:
            if not self._is_open or self.held_for is not None:
                return False
            self._append(message)
            with suppress(OSError):  # what is left tells its thread
                self._send_outbox(time.monotonic())
            return True

    def refuse(self, error: KvbatonError) -> None:
        """Send why a link does not come up; what does not fit the socket's buffer is lost."""
        self._write_all([self._handshake.refusal(error)])

    def finish_connecting(self) -> None:
        """The socket became writable: raise OSError when connecting failed."""
        code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, f"connecting failed: {os.strerror(code)}")
        self.is_connecting = False

    def flush(self, now: float) -> None:
        """Send as much as the socket takes."""
        with self._outbox_lock:
            if not self.is_connecting and self.held_for is None:
                self._send_outbox(now)

    def receive(self, now: float) -> Iterator[Message]:
        """Take what arrived: handshake messages are answered here, others are given out.

        Raises LinkClosedError, OSError, TransferError (malformed) or the error that the handshake fails with.
        """
        try:
            data = self.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise LinkClosedError("closed by the peer")
        if self.is_up:  # the handshake as a whole has to be over in time, not its next byte
            self.heard_at = now
        for frame in self._frames.feed(data):
            message = decode_message(frame)
            if self.is_up:
                yield message
                continue
            self._write_all(self._handshake.receive(message))
            if self.session is not None:
                self.heard_at = now
                self._frames.max_bytes = self._max_frame_bytes
                self._write_all(self._waiting)
                self._waiting.clear()

    def _write_all(self, messages: list[Message]) -> None:
        with self._outbox_lock:
            for message in messages:
                self._append(message)

    def _append(self, message: Message) -> None:
        self._outbox += encode_frame(message, self._max_frame_bytes)
        if len(self._outbox) > _MAX_WAITING_FRAMES * self._max_frame_bytes:
            raise TransferError(f"{len(self._outbox)} bytes wait for a peer that does not read them")

    def _send_outbox(self, now: float) -> None:
        with suppress(BlockingIOError):
            while self._outbox:
                del self._outbox[: self.sock.send(self._outbox)]
                self.sent_at = now
