"""The ``tcp`` transport's sender: lets peers read lent blocks over a data port, one thread per connection."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from engine.connector import KVMemory
from kv_transfer.protocol.reads import LeaseName, ReadRequest, StaleLeaseError
from kv_transfer.transports.block_vectors import socket_blocks
from kv_transfer.transports.block_views import bytes_of_each
from kv_transfer.transports.context import TransportContext
from kv_transfer.transports.data_port import Connection, DataPort, shut_down
from kv_transfer.transports.data_wire import OK_FRAME, STALE_FRAME
from kv_transfer.transports.leases import LeaseBook


class TcpSender:
    """Owns the data port and the leases that are served there."""

    def __init__(self, context: TransportContext, book: LeaseBook | None = None) -> None:
        """Open the port. ``book`` replaces the LeaseBook that calls ``context.on_idle`` (tests)."""
        self._book = book or LeaseBook(context.on_idle)
        self._lock = threading.Lock()
        self._reading: dict[Connection, LeaseName] = {}
        self._port = DataPort(context, "kv-data", self._talk, transport="tcp")
        self.address = self._port.address

    def start(self, memory: KVMemory) -> None:
        """Lend from this pool."""
        self._memory = memory

    def publish(self, name: LeaseName, block_ids: Sequence[int]) -> None:
        """Append blocks to the lease."""
        self._book.extend(name, self._memory, block_ids)

    def release(self, name: LeaseName) -> None:
        """End the lease; a connection that is in the middle of reading it is shut down."""
        self._book.revoke(name)
        with self._lock:
            for connection, reading in self._reading.items():
                if reading == name:
                    shut_down(connection.sock)

    def close(self) -> None:
        """Shut every connection down and join every thread."""
        self._port.close()

    def _talk(self, connection: Connection) -> None:
        while True:
            self._serve(connection, connection.stream.hear_question(ReadRequest))

    def _serve(self, connection: Connection, request: ReadRequest) -> None:
        """Answer a question. Raises StaleLeaseError behind a stale answer, which ends the connection."""
        answers = OK_FRAME
        try:
            with self._book.reading(request) as views, self._reading_for(connection, request.name):
                blocks = socket_blocks(views)
                for start, piece in request.pieces(bytes_of_each(views)):
                    self._book.check(request.name)
                    connection.stream.send_blocks(answers, blocks, start, start + piece.num_blocks)
                    answers = 2 * OK_FRAME  # the verdict about this piece, and the next one's
            answers = OK_FRAME
            self._book.check(request.name)
            connection.stream.send(answers)
        except StaleLeaseError:
            connection.stream.send(STALE_FRAME * (len(answers) // len(OK_FRAME)))
            raise

    @contextmanager
    def _reading_for(self, connection: Connection, name: LeaseName) -> Iterator[None]:
        """Within, the release of the lease ends the connection.

        Not behind it: the peer may release the lease as soon as it has its last byte, and goes on to use the connection.
        """
        with self._lock:
            self._reading[connection] = name
        try:
            yield
        finally:
            with self._lock:
                del self._reading[connection]
