"""Digests of blocks that are not whole yet: of lent ones while they are computed, of read ones while they land."""

import time
from collections.abc import Callable, Sequence

from engine.connector import KVMemory
from kv_transfer.protocol.digests import RunningDigests


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
        """So many bytes of each block are computed now."""
        start = self.num_bytes
        self._digests.go_on(memory.read_view(block_id)[start:num_bytes] for block_id in self._block_ids)
        self.num_bytes = num_bytes

    def finish(self, memory: KVMemory, start: int, end: int) -> tuple[int, ...]:
        """The digests of the blocks ``start``..``end`` - 1, which are whole. Raises what went wrong before."""
        if self.error is not None:
            raise self.error
        if self.num_bytes < memory.layout.block_bytes:
            block_ids = self._block_ids[start:end]
            self._digests.go_on((memory.read_view(each)[self.num_bytes :] for each in block_ids), start)
        return self._digests.values(start, end)


class Landing:
    """A read whose blocks are digested as they land: while the next ones are on their way, and these are still in cache.

    digest: told of the blocks ``start``..``end`` - 1 once. begin: when the copy began, and later by what digesting took.
    """

    def __init__(self, digest: Callable[[int, int], None]) -> None:
        self._digest = digest
        self._num_digested = 0
        self.begin = time.monotonic()

    def landed(self, num_blocks: int) -> None:
        """So many have."""
        if num_blocks > self._num_digested:
            landed_at = time.monotonic()
            self._digest(self._num_digested, num_blocks)
            self._num_digested = num_blocks
            self.begin += time.monotonic() - landed_at


def split_points(num_layers: int, num_parts: int) -> frozenset[int]:
    """After how many layers each group ends, if there is more than one: the last one ends while much is left to compute."""
    ends = (num_layers * part // num_parts for part in range(1, num_parts + 1))
    return frozenset(end for end in ends if end) if num_parts > 1 else frozenset()
