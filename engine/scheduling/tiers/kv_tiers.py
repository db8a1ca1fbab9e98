"""All tiers of an engine: which of them has a content, and the calls that reach each of them."""

from collections.abc import Callable, Collection, Iterable, Sequence

from contract.block_hash import BlockHash
from engine.scheduling.tiers.tier import Tier
from engine.scheduling.tiers.write_behind import Tables, WriteBehind


class KVTiers:
    """All tiers of an engine, fastest first: one at least."""

    def __init__(self, writers: Sequence[WriteBehind]) -> None:
        self._writers = list(writers)
        self.tiers = [writer.tier for writer in writers]

    @property
    def holders(self) -> list[str]:
        """The holders of blocks that are being copied to a tier."""
        return [writer.holder for writer in self._writers]

    @property
    def needs_step(self) -> bool:
        """True while a step would end a batch that is stored, or take orders to the ranks."""
        return any(writer.has_stored or writer.tier.storage.has_orders for writer in self._writers)

    def holds(self, block_hash: BlockHash) -> bool:
        """Return whether a tier has this content."""
        return any(block_hash in tier.slots for tier in self.tiers if not tier.storage.is_off)

    def find(self, hashes: Iterable[BlockHash]) -> list[tuple[Tier, BlockHash]]:
        """Return the longest prefix of ``hashes`` that is stored, each with the fastest tier that has it."""
        ready = [tier for tier in self.tiers if tier.is_ready]
        found: list[tuple[Tier, BlockHash]] = []
        for block_hash in hashes:
            tier = next((one for one in ready if block_hash in one.slots), None)
            if tier is None:
                break
            found.append((tier, block_hash))
        return found

    def offer(self, block_ids: Sequence[int], hashes: Sequence[BlockHash]) -> None:
        """See WriteBehind; each tier stores the blocks by itself."""
        for writer in self._writers:
            writer.offer(block_ids, hashes)

    def advance(self, num_spare: Callable[[], int], next_tables: Tables, *, is_idle: bool) -> None:
        """See WriteBehind; to be called behind each step."""
        for writer in self._writers:
            writer.advance(num_spare, next_tables, is_idle=is_idle)

    def store_now(self, hashes: Sequence[BlockHash]) -> None:
        """Store the blocks that have this content in one tier, and wait for it: their request is about to lose them.

        No block is held for a copy afterwards, unless a tier hangs.
        """
        is_kept = False
        for writer in self._writers:
            is_kept = writer.store_now(hashes, is_kept=is_kept)

    def forget(self, hashes: Collection[BlockHash]) -> None:
        """Drop these contents, which are corrupt."""
        for writer in self._writers:
            writer.tier.drop(hashes)
            writer.forget(hashes)

    def settle(self) -> None:
        """Wait for the end of the batches that are being stored."""
        for writer in self._writers:
            writer.settle()

    def reset(self, model_fingerprint: str | None) -> None:
        """Drop all content. model_fingerprint: of the weights from now on; None: as before."""
        for writer in self._writers:
            writer.tier.slots.clear()
            writer.tier.storage.restart(model_fingerprint)
            writer.reset()

    def flush(self) -> None:
        """Store what is left in the tiers that outlive the engine, which ends; for a few seconds at most."""
        for writer in self._writers:
            if writer.tier.storage.outlives_engine:
                writer.flush()

    def counters(self) -> dict[str, float]:
        """Return the counters and gauges of each tier, with the names of ``serving.metric_names.WORKER_METRICS``."""
        counted: dict[str, float] = {}
        for tier in self.tiers:
            counted |= tier.counters()
        return counted

    def check_integrity(self) -> None:
        """Assert that each tier's records match the pool's."""
        for writer in self._writers:
            writer.check_integrity()
