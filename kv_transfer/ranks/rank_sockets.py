"""The two ends of the sockets between the control half's process and its ranks.

Each rank has one end of a pair of stream sockets. When a socket ends, its rank's process has ended, which the ranks'
executor notices by itself.
"""

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from engine.mailbox import Mailbox
from kv_transfer.links.framing import FrameBuffer
from kv_transfer.ranks.rank_messages import MAX_FRAME_BYTES, FromRank, ToRank, from_rank, to_frame, to_rank

_READ_BYTES = 2**20


class _Connection:
    """The socket to one rank. What is sent is queued, so that a rank that hangs holds up no other thread."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self.sock = sock
        self.outbox = Mailbox[bytes | None]()
        self.is_open = True

    def send_queued(self) -> None:
        """Send what is queued, until a None is or the rank's process has ended."""
        with suppress(OSError):
            while (frame := self.outbox.get()) is not None:
                self.sock.sendall(frame)
        self.is_open = False


class RankSockets:
    """Owns the sockets to all ranks, in rank order, with two threads for each: one sends, one receives.

    ``send`` and ``send_to_all`` may be called from any thread. on_message: called with each rank's messages in their
    order, for one message at a time. on_bug: called with the error that has ended a thread.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        on_message: Callable[[int, FromRank], None],
        on_bug: Callable[[str, BaseException], None],
    ) -> None:
        self._on_message = on_message
        self._on_bug = on_bug
        self._connections = [_Connection(sock) for sock in sockets]
        self._one_at_a_time = threading.Lock()
        self._threads: list[threading.Thread] = []
        for rank, connection in enumerate(self._connections):
            for target, args in ((self._receive, (rank, connection)), (connection.send_queued, ())):
                name = f"kv-ranks-{rank}"
                self._threads.append(threading.Thread(target=target, args=args, name=name, daemon=True))
        for thread in self._threads:
            thread.start()

    def send(self, rank: int, message: ToRank) -> None:
        """Send a message to one rank; it is dropped if the rank's process has ended."""
        self._queue(self._connections[rank], to_frame(message))

    def send_to_all(self, message: ToRank) -> None:
        """Send a message to every rank."""
        frame = to_frame(message)
        for connection in self._connections:
            self._queue(connection, frame)

    def close(self) -> None:
        """End the threads and close the sockets. Idempotent."""
        for connection in self._connections:
            connection.outbox.put(None)
            with suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        for connection in self._connections:
            connection.sock.close()

    def debug_state(self) -> dict[str, object]:
        """Return whether the threads are alive, which ranks are connected, and how many messages wait to be sent."""
        return {
            "is_alive": all(thread.is_alive() for thread in self._threads),
            "open": [rank for rank, each in enumerate(self._connections) if each.is_open],
            "unsent_messages": [each.outbox.num_waiting for each in self._connections],
        }

    def _queue(self, connection: _Connection, frame: bytes) -> None:
        if connection.is_open:
            connection.outbox.put(frame)

    def _receive(self, rank: int, connection: _Connection) -> None:
        try:
            for frame in _frames_of(connection.sock):
                message: FromRank = from_rank.decode(frame)
                with self._one_at_a_time:
                    self._on_message(rank, message)
        except Exception as error:  # noqa: BLE001 - the boundary of the thread: the connector must learn of its end
            self._on_bug(threading.current_thread().name, error)
        connection.is_open = False
        connection.outbox.put(None)


class RankSocket:
    """A rank's end of its socket, which it owns. ``send`` may be called from any thread."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._lock = threading.Lock()

    def send(self, message: FromRank) -> None:
        """Send a message; it is dropped if the other process has ended. The other end always reads."""
        frame = to_frame(message)
        with self._lock, suppress(OSError):
            self._sock.sendall(frame)

    def messages(self) -> Iterator[ToRank]:
        """Yield every message until the stream ends."""
        return map(to_rank.decode, _frames_of(self._sock))

    def shut_down(self) -> None:
        """End ``messages``, in whatever thread it runs."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()


def _frames_of(sock: socket.socket) -> Iterator[bytes]:
    frames = FrameBuffer(MAX_FRAME_BYTES)
    with suppress(OSError):
        while data := sock.recv(_READ_BYTES):
            yield from frames.feed(data)
