"""The ``tcp`` transport's sender: lets peers read lent blocks over a data port, one thread per connection."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from engine.connector import KVMemory
from kv_transfer.protocol.reads import LeaseName, ReadRequest, StaleLeaseError
from kv_transfer.transports.block_views import bytes_of_each
from kv_transfer.transports.data_port import Connection, DataPort, shut_down
from kv_transfer.transports.leases import LeaseBook
from kv_transfer.transports.tcp.stream import OK_FRAME, STALE_FRAME, DataStream, socket_blocks
from kv_transfer.transports.transport import TransportContext


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
        stream = DataStream(connection.sock)
        while True:
            request = stream.receive_request(ReadRequest)
            self._answer(connection, stream, request)

    def _answer(self, connection: Connection, stream: DataStream, request: ReadRequest) -> None:
        """Answer a request. Raises StaleLeaseError after a STALE answer, which ends the connection."""
        answers = OK_FRAME
        try:
            with self._book.reading(request) as views, self._reading_for(connection, request.name):
                blocks = socket_blocks(views)
                for start, piece in request.pieces(bytes_of_each(views)):
                    self._book.check(request.name)
                    stream.send_blocks(answers, blocks, start, start + piece.num_blocks)
                    answers = 2 * OK_FRAME  # the second one of this piece, and the first one of the next
            answers = OK_FRAME
            self._book.check(request.name)
            stream.send_frames(answers)
        except StaleLeaseError:
            stream.send_frames(STALE_FRAME * (len(answers) // len(OK_FRAME)))
            raise

    @contextmanager
    def _reading_for(self, connection: Connection, name: LeaseName) -> Iterator[None]:
        """Within, the release of the lease ends the connection.

        Afterwards it must not: the peer may release the lease as soon as it has the last byte, and use the connection again.
        """
        with self._lock:
            self._reading[connection] = name
        try:
            yield
        finally:
            with self._lock:
                del self._reading[connection]
