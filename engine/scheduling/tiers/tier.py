"""One tier as the scheduler sees it: its storage, and the content that it has."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from contract.block_hash import BlockHash
from engine.kv_tiers.storage import BlockCopy, TierStorage
from engine.scheduling.tiers.slots import TierSlots


@dataclass
class TierCounts:
    """Counts blocks since the start. failed: damaged ones, and those that could not be stored."""

    stored: int = 0
    loaded: int = 0
    failed: int = 0


class Tier:
    """Owns which content one storage has.

    num_stuck: loads that were abandoned and are not over; no other load waits behind them.
    """

    def __init__(self, storage: TierStorage) -> None:
        self.storage = storage
        self.slots = TierSlots(storage.num_slots)
        self.slots.restore(storage.found)
        self.counts = TierCounts()
        self.num_stuck = 0

    @property
    def is_ready(self) -> bool:
        """True if blocks can be loaded from it."""
        return not self.num_stuck and not self.storage.is_off

    def drop(self, hashes: Collection[BlockHash]) -> None:
        """Drop these contents, which are corrupt, for later engines as well."""
        if slots := self.slots.drop(hashes):
            self.storage.forget(slots)

    def complete_store(self, copies: Sequence[BlockCopy], num_stored: int) -> None:
        """Record the end of a store. num_stored: copies, from the first on, that were made."""
        dropped = [
            copy.slot
            for place, copy in enumerate(copies)
            if not self.slots.complete_store(copy.block_hash, copy.slot, is_stored=place < num_stored)
            and place < num_stored
        ]
        if dropped:
            self.storage.forget(dropped)
        self.counts.stored += num_stored
        self.counts.failed += len(copies) - num_stored

    def complete_load(self, copies: Sequence[BlockCopy], num_intact: int, *, is_over: bool) -> None:
        """Record the end of a load. is_over: it was carried out, so that a block which is not intact is damaged."""
        for copy in copies:
            self.slots.complete_load(copy.block_hash, copy.slot)
        self.counts.loaded += num_intact
        if is_over and num_intact < len(copies):
            self.drop([copies[num_intact].block_hash])
            self.counts.failed += 1

    def counters(self) -> dict[str, int]:
        """Return counters and gauges, with the names of ``serving.metric_names.WORKER_METRICS``."""
        label = f"{{tier={self.storage.kind}}}"
        return {
            f"kv_tier_stored_blocks_total{label}": self.counts.stored,
            f"kv_tier_loaded_blocks_total{label}": self.counts.loaded,
            f"kv_tier_evicted_blocks_total{label}": self.slots.num_evicted,
            f"kv_tier_failed_blocks_total{label}": self.counts.failed,
            f"kv_tier_bytes{label}": len(self.slots) * self.storage.slot_bytes,
        }
