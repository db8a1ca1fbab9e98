"""Blocks that are lent layer by layer while their forward pass still runs: their digests are made as the layers come."""

from collections.abc import Sequence

import xxhash

from engine.connector import KVMemory
from kv_transfer.orders import PublishOrder

_DIGESTED_AT_ONCE = 2**20


class UnfinishedBlocks:
    """Owns the digests of an order's blocks, of which the first ``num_bytes`` bytes are computed. Used from one thread.

    error: why the order will fail when it is published.
    """

    def __init__(self, order: PublishOrder) -> None:
        self._block_ids = order.block_ids
        self._digests = [xxhash.xxh3_64(seed=seed) for seed in order.seeds]
        self.num_bytes = 0
        self.error: Exception | None = None

    def advance(self, memory: KVMemory, num_bytes: int) -> None:
        """So many bytes of each block are computed now."""
        for block_id, digest in zip(self._block_ids, self._digests, strict=True):
            update(digest, memory.read_view(block_id)[self.num_bytes : num_bytes])
        self.num_bytes = num_bytes

    def finish(self, memory: KVMemory, start: int, end: int) -> tuple[int, ...]:
        """The digests of the order's blocks ``start``..``end`` - 1, which are whole. Raises what went wrong before."""
        if self.error is not None:
            raise self.error
        for block_id, digest in zip(self._block_ids[start:end], self._digests[start:end], strict=True):
            update(digest, memory.read_view(block_id)[self.num_bytes :])
        return tuple(int(digest.intdigest()) for digest in self._digests[start:end])


def split_points(num_layers: int, num_parts: int) -> frozenset[int]:
    """After how many layers each group ends, but for the last one."""
    ends = (num_layers * part // num_parts for part in range(1, num_parts))
    return frozenset(end for end in ends if end)


def update(digest: xxhash.xxh3_64, content: memoryview) -> None:
    """Go on with a digest. Python's lock can be had by others after every mebibyte."""
    for start in range(0, content.nbytes, _DIGESTED_AT_ONCE):
        digest.update(content[start : start + _DIGESTED_AT_ONCE])


def digest_of(block: memoryview, seed: int) -> int:
    """What a block is announced and verified with."""
    if block.nbytes <= _DIGESTED_AT_ONCE:
        return int(xxhash.xxh3_64_intdigest(block, seed=seed))
    digest = xxhash.xxh3_64(seed=seed)
    update(digest, block)
    return int(digest.intdigest())


def digests_of(blocks: Sequence[memoryview], seeds: Sequence[int]) -> tuple[int, ...]:
    """``digest_of`` each, one block at least; all have one size."""
    if blocks[0].nbytes > _DIGESTED_AT_ONCE:
        return tuple(map(digest_of, blocks, seeds))
    return tuple(map(xxhash.xxh3_64_intdigest, blocks, seeds))  # no Python for each of thousands
