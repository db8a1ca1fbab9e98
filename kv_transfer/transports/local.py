"""The ``local`` transport: both workers in one process, one copy per block (tests, role ``both``)."""

import threading
from collections.abc import Callable, Sequence

from contract.errors import PeerUnreachableError
from engine.connector import KVMemory
from kv_transfer.protocol.reads import LeaseName, Read, ReadRequest, Source, StaleLeaseError
from kv_transfer.transports.leases import LeaseBook, Sessions


class LocalHub:
    """The local senders of one process by their addresses. Pass one object to all of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._senders: dict[str, LocalSender] = {}

    def join(self, sender: "LocalSender") -> None:
        """Make a sender reachable."""
        with self._lock:
            self._senders[sender.address] = sender

    def leave(self, sender: "LocalSender") -> None:
        """Make it unreachable."""
        with self._lock:
            self._senders.pop(sender.address, None)

    def find(self, source: Source) -> "LocalSender":
        """Return the sender at ``source``. Raises PeerUnreachableError."""
        with self._lock:
            sender = self._senders.get(source.address)
        if sender is None:
            raise PeerUnreachableError(f"worker {source.worker_id} has no local sender any more")
        return sender


class LocalSender:
    """Lends blocks to receivers of the same process."""

    def __init__(
        self, boot_id: str, sessions: Sessions, on_idle: Callable[[LeaseName], None], hub: LocalHub
    ) -> None:
        self.address = f"local:{boot_id}"
        self.sessions = sessions
        self.book = LeaseBook(on_idle)
        self._hub = hub
        hub.join(self)

    def start(self, memory: KVMemory) -> None:
        """Lend from this pool."""
        self._memory = memory

    def publish(self, name: LeaseName, block_ids: Sequence[int]) -> None:
        """Append blocks to the lease."""
        self.book.extend(name, self._memory, block_ids)

    def release(self, name: LeaseName) -> None:
        """End the lease; a running copy ends after its block."""
        self.book.revoke(name)

    def close(self) -> None:
        """Leave the hub."""
        self._hub.leave(self)


class LocalReceiver:
    """Copies from senders of the same process."""

    def __init__(self, hub: LocalHub) -> None:
        self._hub = hub

    def fetch(self, source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        """Copy block by block; the lease is checked before each block and after the last byte."""
        sender = self._hub.find(source)
        if source.token not in sender.sessions:
            raise StaleLeaseError(f"worker {source.worker_id} has no such session")
        for number, view in enumerate(views, request.first_block):
            read.check()
            with sender.book.reading(ReadRequest(request.name, number, 1, part=request.part)) as (block,):
                view[:] = block
        sender.book.check(request.name)

    def forget(self, source: Source) -> None:
        """Do nothing: a receiver keeps no state of a source."""

    def close(self) -> None:
        """Find no sender from now on."""
        self._hub = LocalHub()
