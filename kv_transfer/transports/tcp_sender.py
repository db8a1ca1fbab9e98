"""The ``tcp`` transport's sender: lets peers read lent blocks over a data port, one thread per connection."""

import threading
from collections.abc import Sequence

from engine.connector import KVMemory
from kv_transfer.leases import LeaseBook
from kv_transfer.transport import LeaseName, ReadRequest, StaleLeaseError
from kv_transfer.transports.context import TransportContext
from kv_transfer.transports.data_port import DataPort, Visit, shut_down
from kv_transfer.transports.tcp_wire import DataReply, DataStatus

_OK = DataReply(DataStatus.OK).padded()


class TcpSender:
    """Owns the data port and the leases that are served there."""

    def __init__(self, context: TransportContext, book: LeaseBook | None = None) -> None:
        """Open the port. ``book`` replaces the LeaseBook that calls ``context.on_idle`` (tests)."""
        self._book = book or LeaseBook(context.on_idle)
        self._lock = threading.Lock()
        self._reading: dict[Visit, LeaseName] = {}
        self._port = DataPort(context, "kv-data", self._talk)
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
            for visit, reading in self._reading.items():
                if reading == name:
                    shut_down(visit.sock)

    def close(self) -> None:
        """Shut every connection down and join every thread."""
        self._port.close()

    def _talk(self, visit: Visit) -> None:
        owed: list[DataReply] = []
        while True:
            owed = self._answer(visit, visit.stream.hear_question(ReadRequest), owed)

    def _answer(self, visit: Visit, request: ReadRequest, owed: list[DataReply]) -> list[DataReply]:
        """Say what is ``owed``, and serve a piece: the bytes only under a valid lease, and the verdict after the last.

        Returns the verdict where it can be said together with the next piece, as that was asked for already.
        """
        verdict = _OK
        try:
            with self._book.reading(request) as views:
                with self._lock:
                    self._reading[visit] = request.name
                self._book.check(request.name)
                visit.stream.say_all([*owed, _OK], views)
                owed = []
            self._book.check(request.name)
        except StaleLeaseError as error:
            verdict = DataReply(DataStatus.STALE, error.message).padded()
        finally:
            # Before the verdict: the peer may release the lease as soon as it has read it, and goes on to use the
            # connection.
            with self._lock:
                self._reading.pop(visit, None)
        if visit.stream.has_question and verdict is _OK:
            return [_OK]
        visit.stream.say_all([*owed, verdict])
        return []
