"""The sender's record of who may read what: leases with counted readers, and the sessions of live control links."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from contract.proofs import make_proof
from engine.connector import KVMemory
from kv_transfer.protocol.reads import LeaseName, ReadRequest, StaleLeaseError
from kv_transfer.transports.block_views import BlockViews, flat_views, is_flat, read_views


@dataclass
class _Lease:
    """Blocks of ``memory``. num_revokes: calls of ``revoke`` that wait for the readers. views: of a flat pool."""

    memory: KVMemory
    block_ids: npt.NDArray[np.int64]
    num_readers: int = 0
    num_revokes: int = 0
    views: BlockViews | None = None

    def extend(self, block_ids: Sequence[int]) -> None:
        self.block_ids = np.concatenate([self.block_ids, block_ids], dtype=np.int64)
        if is_flat(self.memory):
            self.views = flat_views(self.memory, self.block_ids)
            self.views.keep_addresses()

    def read(self, request: ReadRequest) -> Sequence[memoryview]:
        wanted = request.within(len(self.block_ids))
        if self.views is not None and request.part is None:
            return self.views[wanted]
        return read_views(self.memory, self.block_ids[wanted], request.part)


class LeaseBook:
    """The leases of one sender; owns their reader counts. Thread-safe.

    A sender whose readers hold blocks up uses ``reading``; one that copies them first uses ``block_ids`` and then ``check``.
    """

    def __init__(self, on_idle: Callable[[LeaseName], None]) -> None:
        self._on_idle = on_idle
        self._lock = threading.Lock()
        self._leases: dict[LeaseName, _Lease] = {}

    def extend(self, name: LeaseName, memory: KVMemory, block_ids: Sequence[int]) -> None:
        """Make ``block_ids`` readable as the next blocks of this lease."""
        with self._lock:
            lease = self._leases.setdefault(name, _Lease(memory, np.zeros(0, np.int64)))
            lease.extend(block_ids)

    def revoke(self, name: LeaseName) -> None:
        """End the lease; ``on_idle`` is called once for each call, as soon as it has no reader."""
        with self._lock:
            lease = self._leases.get(name)
            if lease is not None and lease.num_readers:
                lease.num_revokes += 1
                return
            self._leases.pop(name, None)
        self._on_idle(name)

    def revoke_all(self) -> None:
        """End every lease, without a call of ``on_idle``."""
        with self._lock:
            self._leases.clear()

    @contextmanager
    def reading(self, request: ReadRequest) -> Iterator[Sequence[memoryview]]:
        """Yield the requested blocks' bytes; the lease cannot become idle within.

        Raises StaleLeaseError, and TransferError for a part that no block has.
        """
        lease = self._begin(request)
        try:
            yield lease.read(request)
        finally:
            self._end(request.name, lease)

    def block_ids(self, request: ReadRequest) -> npt.NDArray[np.int64]:
        """Return the pool's blocks that are requested, under a lease that is valid now. Raises StaleLeaseError."""
        with self._lock:
            lent = self._valid(request.name).block_ids
        return lent[request.within(len(lent))]

    def check(self, name: LeaseName) -> None:
        """Raise StaleLeaseError unless the lease is valid now."""
        with self._lock:
            self._valid(name)

    def _valid(self, name: LeaseName) -> _Lease:
        lease = self._leases.get(name)
        if lease is None or lease.num_revokes:
            raise StaleLeaseError(
                f"the lease of transfer {name.transfer_id} (attempt {name.attempt}) is over or was never given"
            )
        return lease

    def _begin(self, request: ReadRequest) -> _Lease:
        with self._lock:
            lease = self._valid(request.name)
            lease.num_readers += 1
            return lease

    def _end(self, name: LeaseName, lease: _Lease) -> None:
        with self._lock:
            lease.num_readers -= 1
            if lease.num_readers or not lease.num_revokes:
                return
            self._leases.pop(name, None)
        for _ in range(lease.num_revokes):
            self._on_idle(name)


class Sessions:
    """The tokens of the control links that peers hold open to this worker now. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens: dict[str, str] = {}
        self._on_end: list[Callable[[str], None]] = []

    def listen(self, on_end: Callable[[str], None]) -> None:
        """Call ``on_end(token)`` whenever a session ends."""
        self._on_end.append(on_end)

    def begin(self, token: str, then: Callable[[], None] = lambda: None) -> bool:
        """Accept the peer of this session from now on. Returns True, and ``then`` is not called (see ``RankQuestions``)."""
        with self._lock:
            self._tokens[session_name(token)] = token
        return True

    def end(self, token: str) -> None:
        """End the session: its link is gone."""
        with self._lock:
            self._tokens.pop(session_name(token), None)
        for listener in self._on_end:
            listener(token)

    def __contains__(self, token: str) -> bool:
        with self._lock:
            return token in self._tokens.values()

    def find(self, name: str) -> str | None:
        """Return the token of the open session with this name (``session_name``), if any."""
        with self._lock:
            return self._tokens.get(name)


def session_name(token: str) -> str:
    """Return the session's name, which reveals nothing of its token."""
    return make_proof(token.encode(), "session name")
