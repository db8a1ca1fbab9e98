"""The ``local`` transport: both workers in one process, one copy per block (tests, role ``both``)."""

from collections.abc import Callable, Sequence

from contract.errors import PeerUnreachableError
from kv_transfer.protocol.reads import LeaseName, Read, ReadRequest, Source, StaleLeaseError
from kv_transfer.transports.leases import LeaseBook, LendingSender, Sessions


class LocalHub:
    """The local senders of one process by their addresses. Pass one object to all of them."""

    def __init__(self) -> None:
        self.senders: dict[str, LocalSender] = {}


class LocalSender(LendingSender):
    """Lends blocks to receivers of the same process. A running copy ends after its block when the lease is released."""

    def __init__(
        self, boot_id: str, sessions: Sessions, on_idle: Callable[[LeaseName], None], hub: LocalHub
    ) -> None:
        super().__init__(LeaseBook(on_idle))
        self.address = f"local:{boot_id}"
        self.sessions = sessions
        self._senders = hub.senders
        self._senders[self.address] = self

    def close(self) -> None:
        """Make it unreachable."""
        self._senders.pop(self.address, None)


class LocalReceiver:
    """Copies from senders of the same process."""

    def __init__(self, hub: LocalHub) -> None:
        self._senders = hub.senders

    def fetch(self, source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        """Copy block by block; the lease is checked before each block and after the last byte."""
        sender = self._senders.get(source.address)
        if sender is None:
            raise PeerUnreachableError(f"worker {source.worker_id} has no local sender any more")
        if source.token not in sender.sessions:
            raise StaleLeaseError(f"worker {source.worker_id} has no such session")
        for number, view in enumerate(views, request.first_block):
            read.check()
            with sender.leases.reading(ReadRequest(request.name, number, 1, part=request.part)) as (block,):
                view[:] = block
        sender.leases.check(request.name)

    def forget(self, source: Source) -> None:
        """Do nothing: a receiver keeps no state of a source."""

    def close(self) -> None:
        """Find no sender from now on."""
        self._senders = {}
