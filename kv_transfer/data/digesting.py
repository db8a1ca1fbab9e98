"""Digests of blocks in a pool, also of those that are not complete yet: being computed, or landing."""

import time
from collections.abc import Callable, Sequence

from engine.connector import KVMemory
from kv_transfer.protocol.digests import RunningDigests
from kv_transfer.transports.block_views import BlockViews, KeptViews, is_flat


class DigestViews:
    """Views of blocks to digest; those of whole blocks of a flat pool are kept. Used from any thread."""

    def __init__(self, memory: KVMemory) -> None:
        self._kept = KeptViews(memory) if is_flat(memory) else None

    def of(self, views: Sequence[memoryview]) -> Sequence[memoryview]:
        """Return views of the same blocks, kept ones if possible."""
        if self._kept is None or not isinstance(views, BlockViews) or views.part is not None:
            return views
        return self._kept.of(views.block_ids)


class UnfinishedBlocks:
    """Owns the digests of lent blocks, of which the first ``num_bytes`` bytes are computed. Used from one thread.

    error: why they will fail when they are published.
    """

    def __init__(self, block_ids: Sequence[int], seeds: Sequence[int]) -> None:
        self._block_ids = block_ids
        self._digests = RunningDigests(seeds)
        self.num_bytes = 0
        self.error: Exception | None = None

    def advance(self, memory: KVMemory, num_bytes: int) -> None:
        """Digest the blocks' next bytes: the first ``num_bytes`` of each are computed now."""
        start = self.num_bytes
        self._digests.go_on(memory.read_view(block_id)[start:num_bytes] for block_id in self._block_ids)
        self.num_bytes = num_bytes

    def finish(self, memory: KVMemory, start: int, end: int) -> tuple[int, ...]:
        """Return the digests of blocks ``start``..``end`` - 1, which are complete. Raises ``error``."""
        if self.error is not None:
            raise self.error
        if self.num_bytes < memory.layout.block_bytes:
            block_ids = self._block_ids[start:end]
            self._digests.go_on((memory.read_view(each)[self.num_bytes :] for each in block_ids), start)
        return self._digests.values(start, end)


class Landing:
    """Digests the blocks of a read as they land: while the next ones are on their way, and these are still cached.

    digest: called once for each range ``start``..``end`` - 1. begin: when the copy began; moved by the time that digesting
    took, so that only copying is measured.
    """

    def __init__(self, digest: Callable[[int, int], None]) -> None:
        self._digest = digest
        self._num_digested = 0
        self.begin = time.monotonic()

    def landed(self, num_blocks: int) -> None:
        """Record that the first ``num_blocks`` blocks have arrived and digest the new ones."""
        if num_blocks > self._num_digested:
            landed_at = time.monotonic()
            self._digest(self._num_digested, num_blocks)
            self._num_digested = num_blocks
            self.begin += time.monotonic() - landed_at
