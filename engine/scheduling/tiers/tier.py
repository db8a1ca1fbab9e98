"""The tiers of an engine: what each of them holds, and the write-behind by which full blocks of the pool come there.

A block is offered when it is full and computed, or received. It is stored soon afterwards, while it is still in the pool, so
that a preemption and an eviction copy nothing. One batch of blocks is copied at a time: what the tier cannot keep up with
waits, and is dropped when its block gets another content.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from contract.block_hash import BlockHash
from engine.kv_tiers.storage import BlockCopy, TierStorage
from engine.scheduling.blocks.block_pool import BlockPool
from engine.scheduling.tiers.slots import TierSlots

# More blocks than this are no faster to copy together, and a load waits for the end of a batch.
_MAX_BATCH = 64
# The part of the pool whose blocks may be held for copies only.
_MAX_HELD = 8


@dataclass
class TierCounts:
    """Counts blocks since the start. failed: damaged ones, and those that could not be stored."""

    stored: int = 0
    loaded: int = 0
    failed: int = 0


class Tier:
    """Owns what one storage holds, and the blocks that are to be stored there.

    holder: the holder in the pool of the blocks that are being copied: until the copy is over, they are not given to others.
    wake: wakes the step loop, from any thread. num_stuck: loads that were abandoned and are not over; no other load waits
    behind them.
    """

    def __init__(self, storage: TierStorage, pool: BlockPool, wake: Callable[[], None]) -> None:
        self.storage = storage
        self.slots = TierSlots(storage.num_slots)
        self.counts = TierCounts()
        self.holder = f"tier:{storage.name}"
        self.num_stuck = 0
        self._pool = pool
        self._wake = wake
        self._is_idle = True
        # By block, so that there are never more than the pool has. Oldest first: these are evicted first, too.
        self._unstored: dict[int, BlockHash] = {}
        self._batch: tuple[Future[int], list[BlockCopy]] | None = None

    @property
    def has_stored(self) -> bool:
        """True while ``advance`` would end a batch."""
        return self._batch is not None and self._batch[0].done()

    def offer(self, block_ids: Sequence[int], hashes: Sequence[BlockHash]) -> None:
        """Store these blocks, which are full, when there is time; those that are stored already count as used."""
        for block_id, block_hash in zip(block_ids, hashes, strict=True):
            if block_hash in self.slots:
                self.slots.touch(block_hash)
            elif not self.slots.is_expected(block_hash):
                self._unstored[block_id] = block_hash

    def advance(self, num_spare: Callable[[], int], *, is_idle: bool) -> None:
        """End the batch that is stored, and begin the next one.

        num_spare: returns how many free blocks may be held. is_idle: the step loop has to be woken when the batch is stored;
        a busy one asks after each step.
        """
        self._is_idle = is_idle  # first: a batch that ends now either sees it, or is seen to have ended
        if self._batch is None or self._finish():
            self._begin(num_spare)

    def complete_load(self, copies: Sequence[BlockCopy], num_intact: int, *, is_over: bool) -> None:
        """Record the end of a load. is_over: it was carried out, so that a block which is not intact is damaged."""
        for copy in copies:
            self.slots.complete_load(copy.block_hash, copy.slot)
        self.counts.loaded += num_intact
        if is_over and num_intact < len(copies):
            self.slots.drop([copies[num_intact].block_hash])
            self.counts.failed += 1

    def forget(self, hashes: Collection[BlockHash]) -> None:
        """Drop these contents, which are corrupt."""
        self.slots.drop(hashes)
        forgotten = set(hashes)
        self._unstored = {block: one for block, one in self._unstored.items() if one not in forgotten}

    def settle(self) -> None:
        """Wait for the end of the batch that is being stored."""
        if self._batch is not None:
            self.storage.settle()
            self._finish()

    def reset(self) -> None:
        """Drop all content."""
        self.slots.clear()
        self._unstored.clear()

    def check_integrity(self) -> None:
        """Assert that the blocks of the batch, and no others, are held for it."""
        copies = self._batch[1] if self._batch else []
        assert self._pool.table_of(self.holder) == [copy.block_id for copy in copies]
        self.slots.check_integrity(len(copies))

    def _finish(self) -> bool:
        """End the batch; return False if it is not over."""
        assert self._batch is not None, "there is no batch"
        future, copies = self._batch
        if not future.done():
            return False
        self._batch = None
        num_stored = future.result()
        for place, copy in enumerate(copies):
            self.slots.complete_store(copy.block_hash, copy.slot, is_stored=place < num_stored)
        self._pool.free(self.holder)
        self.counts.stored += num_stored
        self.counts.failed += len(copies) - num_stored
        return True

    def _begin(self, num_spare: Callable[[], int]) -> None:
        copies: list[BlockCopy] = []
        max_batch = min(_MAX_BATCH, max(1, self._pool.num_usable_blocks // _MAX_HELD))
        spare: int | None = None
        while self._unstored and len(copies) < max_batch:
            block_id = next(iter(self._unstored))
            block_hash = self._unstored.pop(block_id)
            if self.slots.is_expected(block_hash) or not self._pool.has_content(block_id, block_hash):
                continue
            if self._pool.is_free(block_id):
                # Held only if no running request needs it: a copy preempts none. It is offered again when it is found.
                spare = num_spare() if spare is None else spare
                if spare <= 0:
                    continue
                spare -= 1
            slot = self.slots.prepare_store(block_hash)
            if slot is None:
                break
            copies.append(BlockCopy(block_id, slot, block_hash))
        if copies:
            self._pool.allocate(self.holder, 0, [copy.block_id for copy in copies])
            future = self.storage.store(copies)
            self._batch = future, copies
            future.add_done_callback(lambda _: self._wake() if self._is_idle else None)


class KVTiers:
    """All tiers of an engine, fastest first; in an engine without any, each method does nothing."""

    def __init__(self, tiers: Sequence[Tier] = ()) -> None:
        self.tiers = list(tiers)

    @property
    def has_stored(self) -> bool:
        """True while ``advance`` would end a batch."""
        return any(tier.has_stored for tier in self.tiers)

    def holds(self, block_hash: BlockHash) -> bool:
        """Return whether a tier has this content."""
        return any(block_hash in tier.slots for tier in self.tiers)

    def find(self, hashes: Iterable[BlockHash]) -> list[tuple[Tier, BlockHash]]:
        """Return the longest prefix of ``hashes`` that is stored, each with the fastest tier that has it."""
        ready = [tier for tier in self.tiers if not tier.num_stuck]
        found: list[tuple[Tier, BlockHash]] = []
        for block_hash in hashes:
            tier = next((one for one in ready if block_hash in one.slots), None)
            if tier is None:
                break
            found.append((tier, block_hash))
        return found

    def offer(self, block_ids: Sequence[int], hashes: Sequence[BlockHash]) -> None:
        """See Tier; each tier stores the blocks by itself."""
        for tier in self.tiers:
            tier.offer(block_ids, hashes)

    def advance(self, num_spare: Callable[[], int], *, is_idle: bool) -> None:
        """See Tier; to be called behind each step."""
        for tier in self.tiers:
            tier.advance(num_spare, is_idle=is_idle)

    def forget(self, hashes: Collection[BlockHash]) -> None:
        """Drop these contents, which are corrupt."""
        for tier in self.tiers:
            tier.forget(hashes)

    def settle(self) -> None:
        """Wait for the end of the batches that are being stored."""
        for tier in self.tiers:
            tier.settle()

    def reset(self) -> None:
        """Drop all content."""
        for tier in self.tiers:
            tier.reset()

    def counters(self) -> dict[str, float]:
        """Return counters and gauges, with the names of ``serving.metric_names.WORKER_METRICS``."""
        counted: dict[str, float] = {}
        for tier in self.tiers:
            label = f"{{tier={tier.storage.name}}}"
            counted |= {
                f"kv_tier_stored_blocks_total{label}": tier.counts.stored,
                f"kv_tier_loaded_blocks_total{label}": tier.counts.loaded,
                f"kv_tier_evicted_blocks_total{label}": tier.slots.num_evicted,
                f"kv_tier_failed_blocks_total{label}": tier.counts.failed,
                f"kv_tier_bytes{label}": len(tier.slots) * tier.storage.slot_bytes,
            }
        return counted

    def check_integrity(self) -> None:
        """Assert that each tier's records match the pool's."""
        for tier in self.tiers:
            tier.check_integrity()
