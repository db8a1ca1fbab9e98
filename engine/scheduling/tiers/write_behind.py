"""Write-behind: the blocks of the pool whose content may be lost next are copied to a tier, while they still have it.

A block is offered when it is full and computed, or received. While requests run, it is stored only when it is one of the
next to get another content: the *watermark* is a number of blocks, counted from the head of the pool's list of free ones
(the order of eviction) and then through the requests that would be preempted, and within it everything is stored. So a pool
with blocks that never had any content stores nothing, and copies are made in large batches. An idle engine stores the rest.

One batch is copied at a time: what the tier cannot keep up with is lost when its block gets another content. Only a
preemption waits for a copy, of what its request has computed and the tier does not have yet.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from contract.block_hash import BlockHash
from engine.kv_tiers.storage import BlockCopy
from engine.scheduling.blocks.block_pool import NULL_BLOCK, BlockPool
from engine.scheduling.tiers.tier import Tier

Tables = Callable[[], Iterable[Sequence[int]]]
"""Returns the blocks of each request that may be preempted, the next one first."""

# More blocks than this are no faster to copy together, and a load waits for the end of a batch.
_MAX_BATCH = 256
# The part of the pool whose blocks may be held for copies only; and the part that the watermark is at least.
_SHARE = 8
# For longer than this, the end of an engine does not wait for its content to be stored.
_MAX_FLUSH_SECONDS = 5.0
# For longer than this, a preemption does not wait for a tier: what is not stored is computed again.
MAX_SECONDS = 1.0


def watermark(num_usable_blocks: int, num_step_blocks: int) -> int:
    """Return how many of the next blocks to get another content are kept stored.

    An eighth of the pool, and at least what two of the longest steps can allocate: the list is searched again when half of
    these blocks have left it.
    """
    return min(num_usable_blocks, max(num_usable_blocks // _SHARE, 2 * num_step_blocks))


@dataclass(frozen=True)
class _Batch:
    """Blocks that are being copied. next_blocks: the head of the list of free blocks, from which some of them come."""

    future: Future[int]
    copies: Sequence[BlockCopy]
    next_blocks: Sequence[int]


class WriteBehind:
    """Owns the blocks that are to be stored in one tier, and those that are being stored.

    holder: the holder in the pool of the blocks that are being copied: until the copy is over, they are not given to others.
    num_guarded: see ``watermark``. wake: wakes the step loop, from any thread.
    """

    def __init__(self, tier: Tier, pool: BlockPool, num_guarded: int, wake: Callable[[], None]) -> None:
        self.tier = tier
        self.holder = f"tier:{tier.storage.name}"
        self._pool = pool
        self._num_guarded = num_guarded
        self._wake = wake
        self._is_idle = True
        # By block, so that there are never more than the pool has; oldest first.
        self._unstored: dict[int, BlockHash] = {}
        self._batch: _Batch | None = None
        # The pool's eviction clock before which everything within the watermark is stored.
        self._guarded_until = 0

    @property
    def has_stored(self) -> bool:
        """True while ``advance`` would end a batch."""
        return self._batch is not None and self._batch.future.done()

    def offer(self, block_ids: Sequence[int], hashes: Sequence[BlockHash]) -> None:
        """Store these blocks, which are full, before they are lost; those that are stored already count as used.

        The null block has no content.
        """
        slots = self.tier.slots
        if self.tier.storage.is_off:
            return
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            if block_id == NULL_BLOCK:
                continue
            if block_hash in slots:
                slots.touch(block_hash)
            elif not slots.is_expected(block_hash):
                self._unstored[block_id] = block_hash

    def advance(self, num_spare: Callable[[], int], next_tables: Tables, *, is_idle: bool) -> None:
        """End the batch that is stored, and begin the next one.

        num_spare: returns how many free blocks may be held. is_idle: no request runs; the step loop has to be woken when the
        batch is stored, while a busy one asks after each step.
        """
        self._is_idle = is_idle  # first: a batch that ends now either sees it, or is seen to have ended
        if (self._batch is None or self._finish()) and self._unstored:
            self._begin_next(num_spare, next_tables)

    def store_now(self, found: Sequence[tuple[int, BlockHash]], *, is_kept: bool) -> bool:
        """Store these blocks with their content, and wait for it: their request is about to lose them.

        Nothing is held for a copy afterwards, unless the tier hangs. is_kept: a faster tier has the content, so that it is
        not stored here. Returns whether a tier has it.
        """
        block_ids = [block_id for block_id, _ in found]
        self.offer(block_ids, [block_hash for _, block_hash in found])
        missing = [] if is_kept else [block_id for block_id in block_ids if block_id in self._unstored]
        if self._batch is None and not missing:
            return True
        if self.tier.num_stuck or not self.settle(MAX_SECONDS):
            return is_kept
        is_whole = self._begin(missing, lambda: len(missing), len(missing))
        return self.settle(MAX_SECONDS) and is_whole

    def forget(self, hashes: Collection[BlockHash]) -> None:
        """Do not store these contents, which are corrupt."""
        forgotten = set(hashes)
        self._unstored = {block: one for block, one in self._unstored.items() if one not in forgotten}

    def settle(self, timeout_seconds: float | None = None) -> bool:
        """Wait for the end of the batch that is being stored; return False if it was not over in time."""
        if self._batch is None:
            return True
        return self.tier.storage.settle(timeout_seconds) and self._finish()

    def flush(self) -> None:
        """Store everything that is left, for a few seconds at most: no request is live, and the engine ends."""
        end = time.monotonic() + _MAX_FLUSH_SECONDS
        self._is_idle = True
        while self.settle(max(0.0, end - time.monotonic())) and self._unstored:
            self._begin_next(lambda: self._pool.num_free_blocks, lambda: ())
            if self._batch is None:
                return

    def reset(self) -> None:
        """Drop everything that is not stored."""
        self._unstored.clear()

    def check_integrity(self) -> None:
        """Assert that the blocks of the batch, and no others, are held for it."""
        copies = self._batch.copies if self._batch else ()
        assert self._pool.table_of(self.holder) == [copy.block_id for copy in copies]
        self.tier.slots.check_integrity(len(copies))

    def _next_lost(self, next_tables: Tables) -> Iterator[int]:
        """Yield the unstored blocks within the watermark, the one that is lost next first."""
        unstored = self._unstored
        blocks = self._pool.next_blocks(self._num_guarded)
        num_left = self._num_guarded - len(blocks)
        yield from filter(unstored.__contains__, blocks)
        for table in next_tables() if num_left > 0 else ():
            yield from filter(unstored.__contains__, reversed(table))
            num_left -= len(table) - table.count(NULL_BLOCK)
            if num_left <= 0:
                return

    def _begin_next(self, num_spare: Callable[[], int], next_tables: Tables) -> None:
        pool = self._pool
        max_batch = min(_MAX_BATCH, max(1, pool.num_usable_blocks // _SHARE))
        if self._is_idle:
            self._begin(list(self._unstored), num_spare, max_batch)
        elif pool.num_free_blocks < self._num_guarded:
            self._begin(self._next_lost(next_tables), num_spare, max_batch)
        # Not in each step: to search a large pool costs as much as many steps on a GPU may lose.
        elif pool.eviction_clock >= self._guarded_until and self._begin(
            self._next_lost(next_tables), num_spare, max_batch
        ):
            self._guarded_until = pool.eviction_clock + self._num_guarded // 2

    def _begin(self, block_ids: Iterable[int], num_spare: Callable[[], int], max_batch: int) -> bool:
        """Begin to copy unstored blocks, ``max_batch`` at most; return whether all of them are stored then."""
        copies: list[BlockCopy] = []
        num_free = 0
        spare: int | None = None
        is_whole = True
        for block_id in block_ids:
            block_hash = self._unstored[block_id]
            if self.tier.slots.is_expected(block_hash) or not self._pool.has_content(block_id, block_hash):
                del self._unstored[block_id]
                continue
            num_needed = self._pool.cost_of([block_id])
            if num_needed and spare is None:
                spare = num_spare()
            # A free block is held only if no running request needs it: a copy preempts none.
            if num_needed and num_free >= (spare or 0):
                is_whole = False
                continue
            slot = self.tier.slots.prepare_store(block_hash) if len(copies) < max_batch else None
            if slot is None:
                is_whole = False
                break
            del self._unstored[block_id]
            copies.append(BlockCopy(block_id, slot, block_hash))
            num_free += num_needed
        if copies:
            num_searched = self._pool.num_free_blocks if self._is_idle else self._num_guarded
            next_blocks = self._pool.next_blocks(num_searched) if num_free else ()
            self._pool.allocate(self.holder, 0, [copy.block_id for copy in copies])
            self._batch = _Batch(self.tier.storage.store(copies), copies, next_blocks)
            self._batch.future.add_done_callback(lambda _: self._wake() if self._is_idle else None)
        return is_whole

    def _finish(self) -> bool:
        """End the batch; return False if it is not over."""
        assert self._batch is not None, "there is no batch"
        batch = self._batch
        if not batch.future.done():
            return False
        self._batch = None
        if self.tier.storage.is_off:
            self._unstored.clear()
        self.tier.complete_store(batch.copies, batch.future.result())
        # A free block keeps its turn: a copy is no use of it.
        self._pool.free(self.holder, batch.next_blocks)
        return True
