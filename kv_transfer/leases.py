"""Who may read what, on the sender's side: leases with counted readers, and the sessions of live control links."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from engine.connector import KVMemory
from kv_transfer.transport import (
    BlockPart,
    LeaseName,
    ReadRequest,
    StaleLeaseError,
    block_span,
    is_flat,
    read_views,
)


@dataclass
class _Lease:
    """views: of the blocks of a flat pool, made when they are lent and not when somebody waits for them."""

    memory: KVMemory
    block_ids: list[int] = field(default_factory=list)
    views: list[memoryview] = field(default_factory=list)
    num_readers: int = 0
    num_revokes: int = 0

    def read(self, request: ReadRequest) -> list[memoryview]:
        if self.views:
            return _cut(request.pick(self.views), request.part)
        return _cut(
            [self.memory.read_view(block_id) for block_id in request.pick(self.block_ids)], request.part
        )


class LeaseBook:
    """The leases of one sender; owns their reader counts. Thread-safe."""

    def __init__(self, on_idle: Callable[[LeaseName], None]) -> None:
        self._on_idle = on_idle
        self._lock = threading.Lock()
        self._leases: dict[LeaseName, _Lease] = {}

    def extend(self, name: LeaseName, memory: KVMemory, block_ids: Sequence[int]) -> None:
        """Make ``block_ids`` readable as the next indices of this lease."""
        views = read_views(memory, block_ids) if is_flat(memory) else ()
        with self._lock:
            lease = self._leases.setdefault(name, _Lease(memory))
            lease.views.extend(views)
            lease.block_ids.extend(block_ids)

    def revoke(self, name: LeaseName) -> None:
        """End the lease; ``on_idle`` is called once for each call, as soon as nobody reads."""
        with self._lock:
            lease = self._leases.get(name)
            if lease is not None and lease.num_readers:
                lease.num_revokes += 1
                return
            self._leases.pop(name, None)
        self._on_idle(name)

    @contextmanager
    def reading(self, request: ReadRequest) -> Iterator[list[memoryview]]:
        """The requested blocks' bytes; the lease cannot become idle within.

        Raises StaleLeaseError, and TransferError for a part that no block has.
        """
        lease = self._begin(request)
        try:
            yield lease.read(request)
        finally:
            self._end(request.name, lease)

    def check(self, name: LeaseName) -> None:
        """Raise StaleLeaseError unless the lease is valid now."""
        with self._lock:
            self._valid(name)

    def _begin(self, request: ReadRequest) -> _Lease:
        with self._lock:
            lease = self._valid(request.name)
            lease.num_readers += 1
            return lease

    def _valid(self, name: LeaseName) -> _Lease:
        lease = self._leases.get(name)
        if lease is None or lease.num_revokes:
            raise StaleLeaseError(
                f"the lease of transfer {name.transfer_id} (attempt {name.attempt}) is over or was never given"
            )
        return lease

    def _end(self, name: LeaseName, lease: _Lease) -> None:
        with self._lock:
            lease.num_readers -= 1
            if lease.num_readers or not lease.num_revokes:
                return
            self._leases.pop(name, None)
        for _ in range(lease.num_revokes):
            self._on_idle(name)


def _cut(views: Sequence[memoryview], part: BlockPart | None) -> list[memoryview]:
    if part is None:
        return list(views)
    start, end = block_span(views[0].nbytes, part)
    return [view[start:end] for view in views]


class Sessions:
    """The tokens of the control links that peers hold open to this worker now. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens: set[str] = set()
        self._on_end: list[Callable[[str], None]] = []

    def listen(self, on_end: Callable[[str], None]) -> None:
        """Call ``on_end(token)`` whenever a session ends."""
        self._on_end.append(on_end)

    def begin(self, token: str, then: Callable[[], None] = lambda: None) -> bool:
        """A peer proved itself on a link of this session. True: it is let in from now on, and ``then`` is not called."""
        with self._lock:
            self._tokens.add(token)
        return True

    def end(self, token: str) -> None:
        """The link is gone."""
        with self._lock:
            self._tokens.discard(token)
        for listener in self._on_end:
            listener(token)

    def __contains__(self, token: str) -> bool:
        with self._lock:
            return token in self._tokens
