"""The leases of a sender whose readers need nothing of it: it never learns when they are done, and waits for none."""

import threading
from collections.abc import Callable, Sequence

from kv_transfer.protocol.reads import LeaseName, ReadRequest, StaleLeaseError


class GrantBook:
    """Which blocks each lease lends. A reader asks again after its last byte; nobody is waited for. Thread-safe."""

    def __init__(self, on_idle: Callable[[LeaseName], None]) -> None:
        self._on_idle = on_idle
        self._lock = threading.Lock()
        self._leases: dict[LeaseName, list[int]] = {}

    def extend(self, name: LeaseName, block_ids: Sequence[int]) -> None:
        """Make ``block_ids`` readable as the next blocks of this lease."""
        with self._lock:
            self._leases.setdefault(name, []).extend(block_ids)

    def grant(self, request: ReadRequest) -> list[int]:
        """The pool's blocks that are asked for, under a lease that is valid now. Raises StaleLeaseError."""
        with self._lock:
            lent = self._valid(request.name)
            return lent[request.within(len(lent))]

    def check(self, name: LeaseName) -> None:
        """Raise StaleLeaseError unless the lease is valid now."""
        with self._lock:
            self._valid(name)

    def _valid(self, name: LeaseName) -> list[int]:
        block_ids = self._leases.get(name)
        if block_ids is None:
            raise StaleLeaseError(
                f"the lease of transfer {name.transfer_id} (attempt {name.attempt}) is over or was never given"
            )
        return block_ids

    def revoke(self, name: LeaseName) -> None:
        """End the lease, then call ``on_idle``, once for each call."""
        with self._lock:
            self._leases.pop(name, None)
        self._on_idle(name)

    def revoke_all(self) -> None:
        """End every lease; nobody is told."""
        with self._lock:
            self._leases.clear()
