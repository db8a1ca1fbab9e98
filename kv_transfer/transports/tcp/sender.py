"""The ``tcp`` transport's sender: lets peers read lent blocks over a data port, one thread per connection.

Per read the receiver sends ReadRequest. For each of its pieces (``ReadRequest.pieces``, which both sides cut alike)
the sender sends an answer, the blocks in order if it is OK, and a second answer: the lease was valid after the last
byte. After an answer that is STALE the sender closes the connection. Closing the connection makes a read terminal on
the receiver's side.

An answer is a DataReply without a message, in a frame of ALIGNMENT bytes. So a receiver takes answers and blocks by
one call, and blocks lie in the stream as in memory: the kernel copies them a tenth faster than at odd offsets
(x86-64).
"""

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from engine.connector import KVMemory
from kv_transfer.links.framing import FrameBuffer, ShortReadError, decode_body
from kv_transfer.protocol.reads import LeaseName, ReadRequest, StaleLeaseError
from kv_transfer.transports.block_views import bytes_of_each
from kv_transfer.transports.data_handshake import MAX_DATA_FRAME_BYTES, DataStatus, reply_frame
from kv_transfer.transports.data_port import Connection, DataPort, shut_down
from kv_transfer.transports.leases import LeaseBook
from kv_transfer.transports.tcp.socket_blocks import socket_blocks
from kv_transfer.transports.transport import TransportContext

OK_FRAME = reply_frame(DataStatus.OK)
STALE_FRAME = reply_frame(DataStatus.STALE)
"""The answers among blocks: ALIGNMENT bytes each."""


class TcpSender:
    """Owns the data port and the leases that are read over it."""

    def __init__(self, context: TransportContext, book: LeaseBook | None = None) -> None:
        """Open the port. ``book`` replaces the LeaseBook that calls ``context.on_idle`` (tests)."""
        self._book = book or LeaseBook(context.on_idle)
        self._lock = threading.Lock()
        self._reading: dict[Connection, LeaseName] = {}
        self._port = DataPort(context, "kv-data", self._serve, transport="tcp")
        self.address = self._port.address

    def start(self, memory: KVMemory) -> None:
        """Lend from this pool."""
        self._memory = memory

    def publish(self, name: LeaseName, block_ids: Sequence[int]) -> None:
        """Append blocks to the lease."""
        self._book.extend(name, self._memory, block_ids)

    def release(self, name: LeaseName) -> None:
        """End the lease; shut down a connection that is in the middle of reading it."""
        self._book.revoke(name)
        with self._lock:
            for connection, reading in self._reading.items():
                if reading == name:
                    shut_down(connection.sock)

    def close(self) -> None:
        """Shut every connection down and join every thread."""
        self._port.close()

    def _serve(self, connection: Connection) -> None:
        for request in requests_from(connection.sock):
            self._answer(connection, request)

    def _answer(self, connection: Connection, request: ReadRequest) -> None:
        """Answer a request. Raises StaleLeaseError after a STALE answer, which ends the connection."""
        answers = OK_FRAME
        try:
            with self._book.reading(request) as views, self._reading_for(connection, request.name):
                blocks = socket_blocks(views)
                for start, piece in request.pieces(bytes_of_each(views)):
                    self._book.check(request.name)
                    blocks.send(connection.sock, answers, start, start + piece.num_blocks)
                    answers = 2 * OK_FRAME  # the second one of this piece, and the first one of the next
            answers = OK_FRAME
            self._book.check(request.name)
            connection.sock.sendall(answers)
        except StaleLeaseError:
            connection.sock.sendall(STALE_FRAME * (len(answers) // len(OK_FRAME)))
            raise

    @contextmanager
    def _reading_for(self, connection: Connection, name: LeaseName) -> Iterator[None]:
        """End the connection if the lease is released within.

        Afterwards it must not: the peer may release the lease as soon as it has the last byte, and use the connection again.
        """
        with self._lock:
            self._reading[connection] = name
        try:
            yield
        finally:
            with self._lock:
                del self._reading[connection]


def requests_from(sock: socket.socket) -> Iterator[ReadRequest]:
    """Yield the requests of a connection, which carries nothing else. Raises ShortReadError at its end, TransferError."""
    frames = FrameBuffer(MAX_DATA_FRAME_BYTES)
    while data := sock.recv(MAX_DATA_FRAME_BYTES):
        for body in frames.feed(data):
            yield decode_body(body, ReadRequest)
    raise ShortReadError(0, 1)
