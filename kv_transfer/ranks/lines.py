"""The control half's end of the lines to the ranks: one thread that never waits for any of them.

A line is a pair of stream sockets whose other end a rank has. Its end is the end of the rank's process, which its
executor notices by itself.
"""

import selectors
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from kv_transfer.links.framing import FrameBuffer, encode_frame
from kv_transfer.ranks.words import MAX_LINE_FRAME_BYTES, FromRank, ToRank, from_rank

_READ_BYTES = 2**20


class _Line:
    """One rank's socket, with what arrived in part, and what could not be sent yet (under the lines' lock)."""

    def __init__(self, rank: int, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.rank = rank
        self.sock = sock
        self.frames = FrameBuffer(MAX_LINE_FRAME_BYTES)
        self.outbox = bytearray()
        self.is_open = True
        self.wants_write = False


class RankLines:
    """Owns the sockets, in rank order, and the thread. ``send`` and ``send_to_all`` may be called from any thread.

    hear: gets each rank's words in the order in which it said them; called in the thread. on_bug: what ended the thread.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        hear: Callable[[int, FromRank], None],
        on_bug: Callable[[str, BaseException], None],
    ) -> None:
        self._lines = [_Line(rank, sock) for rank, sock in enumerate(sockets)]
        self._hear = hear
        self._on_bug = on_bug
        self._lock = threading.Lock()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="kv-ranks", daemon=True)
        self._thread.start()

    def send(self, rank: int, word: ToRank) -> None:
        """Say this to one rank; one that is gone does not hear it."""
        self._put([self._lines[rank]], encode_frame(word, MAX_LINE_FRAME_BYTES))

    def send_to_all(self, word: ToRank) -> None:
        """Say this to every rank."""
        self._put(self._lines, encode_frame(word, MAX_LINE_FRAME_BYTES))

    def close(self) -> None:
        """End the thread and hang up. Idempotent."""
        self._is_stopping = True
        self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join()
        for sock in (self._wake_in, self._wake_out, *(line.sock for line in self._lines)):
            sock.close()
        self._selector.close()

    def debug_state(self) -> dict[str, object]:
        """Whether the thread lives, which ranks are there, and what waits to be sent."""
        with self._lock:
            return {
                "is_alive": self._thread.is_alive(),
                "open": [line.rank for line in self._lines if line.is_open],
                "unsent_bytes": [len(line.outbox) for line in self._lines],
            }

    def _put(self, lines: Sequence[_Line], frame: bytes) -> None:
        with self._lock:
            for line in lines:
                if line.is_open:
                    line.outbox += frame
        self._wake()

    def _wake(self) -> None:
        with suppress(OSError):  # a full pipe wakes too; a closed one has nobody to wake
            self._wake_out.send(b"\0")

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 - the boundary of the thread: the connector must hear of its end
            self._on_bug(self._thread.name, error)

    def _serve(self) -> None:
        self._selector.register(self._wake_in, selectors.EVENT_READ, self._drain_wakes)
        for line in self._lines:
            self._selector.register(line.sock, selectors.EVENT_READ, partial(self._read, line))
        while not self._is_stopping:
            for key, _ in self._selector.select():
                key.data()
            for line in self._lines:
                self._flush(line)

    def _drain_wakes(self) -> None:
        with suppress(BlockingIOError):
            while self._wake_in.recv(4096):
                pass

    def _read(self, line: _Line) -> None:
        if not line.is_open:
            return
        try:
            data = line.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose(line)
            return
        for frame in line.frames.feed(data):
            word: FromRank = from_rank.decode(frame)
            self._hear(line.rank, word)

    def _flush(self, line: _Line) -> None:
        if not line.is_open:
            return
        try:
            with self._lock:
                while line.outbox:
                    del line.outbox[: line.sock.send(line.outbox)]
                wants_write = False
        except BlockingIOError:
            wants_write = True
        except OSError:
            self._lose(line)
            return
        if wants_write != line.wants_write:
            line.wants_write = wants_write
            mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if wants_write else 0)
            self._selector.modify(line.sock, mask, partial(self._read, line))

    def _lose(self, line: _Line) -> None:
        """Its process has ended, or is about to."""
        with self._lock:
            line.is_open = False
            line.outbox.clear()
        self._selector.unregister(line.sock)


class RankEnd:
    """A rank's end of its line. Owns the socket; ``say`` may be called from any thread."""

    def __init__(self, sock: socket.socket, decoder: "msgspec.msgpack.Decoder[ToRank]") -> None:
        sock.setblocking(True)
        self._sock = sock
        self._decoder = decoder
        self._frames = FrameBuffer(MAX_LINE_FRAME_BYTES)
        self._lock = threading.Lock()

    def say(self, word: FromRank) -> None:
        """Tell the control half; it always listens, or is gone, and then nobody needs to hear it."""
        frame = encode_frame(word, MAX_LINE_FRAME_BYTES)
        with self._lock, suppress(OSError):
            self._sock.sendall(frame)

    def listen(self, hear: Callable[[ToRank], None]) -> None:
        """Until the line ends: pass on what the control half says."""
        while data := self._receive():
            for frame in self._frames.feed(data):
                hear(self._decoder.decode(frame))

    def hang_up(self) -> None:
        """End ``listen``, in whatever thread."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the socket back."""
        self._sock.close()

    def _receive(self) -> bytes:
        try:
            return self._sock.recv(_READ_BYTES)
        except OSError:
            return b""
