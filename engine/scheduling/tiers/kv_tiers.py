"""All tiers of an engine: which of them has a content of a group of layers, and the calls that reach each of them."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial

from contract.block_hash import BlockHash
from contract.cache_layout import CacheGroup
from engine.scheduling.blocks.block_pool import BlockPool
from engine.scheduling.blocks.cache_pools import Blocks, CachePools
from engine.scheduling.requests.request import Request
from engine.scheduling.tiers.swapped_states import SwappedStates
from engine.scheduling.tiers.tier import Tier
from engine.scheduling.tiers.write_behind import WriteBehind

NumSpare = Callable[[CacheGroup, BlockPool], int]
"""Returns how many free blocks of a group may be held."""
NextTables = Callable[[BlockPool], Iterable[Sequence[int]]]
"""Returns the blocks in this pool of each request that may be preempted, the next one first."""


class KVTiers:
    """The tiers of each group of layers: content of a group is stored and found beside its pool.

    groups: of each group with KV its tiers, fastest first; one at least. states: of recurrent layers; None without any. A
    model with states has only preempted requests in its tiers.
    """

    def __init__(
        self,
        pools: CachePools,
        groups: Sequence[Sequence[WriteBehind]],
        states: SwappedStates | None = None,
    ) -> None:
        self.states = states
        self._pools = pools
        self._groups = [list(writers) for writers in groups]
        self._writers = [writer for writers in self._groups for writer in writers]
        self.tiers = [writer.tier for writer in self._writers] + (states.tiers if states else [])

    @property
    def holders(self) -> list[str]:
        """The holders of blocks that are being copied to a tier."""
        return [writer.holder for writer in self._writers] + (self.states.holders if self.states else [])

    @property
    def needs_step(self) -> bool:
        """True while a step would end a batch that is stored, or take orders to the ranks."""
        has_stored = any(writer.has_stored for writer in self._writers)
        return has_stored or any(tier.storage.has_orders for tier in self.tiers)

    def has_part_of(self, request: Request) -> bool:
        """Return whether a tier has the first block of a request; with windows, any; with states, these."""
        if self.states is not None:
            return (
                self.states.find(request.hashes.text_hash(request.token_ids, request.num_swapped_tokens))
                is not None
            )
        hashes = request.block_hashes
        first = hashes if self._pools.groups[0].window is not None else hashes[:1]
        tiers = [writer.tier for writer in self._groups[0] if not writer.tier.storage.is_off]
        return any(block_hash in tier.slots for block_hash in first for tier in tiers)

    def find(self, hashes: Iterable[BlockHash]) -> list[Tier]:
        """Return the fastest tier of each block of the longest prefix of ``hashes`` that tiers have of the first group."""
        found = []
        for tier in self.find_each(0, hashes):
            if tier is None:
                break
            found.append(tier)
        return found

    def find_each(self, group: int, hashes: Iterable[BlockHash]) -> Iterable[Tier | None]:
        """Yield the fastest tier that has the content of this group, for each hash."""
        ready = [writer.tier for writer in self._groups[group] if writer.tier.is_ready]
        for block_hash in hashes:
            yield next((tier for tier in ready if block_hash in tier.slots), None)

    def offer(self, blocks: Blocks, hashes: Sequence[BlockHash]) -> None:
        """Store these blocks of each group; see WriteBehind. Each tier does it by itself."""
        if self.states is not None:
            return  # no prefix continues from the KV alone
        for own, writers in zip(blocks, self._groups, strict=False):
            for writer in writers:
                writer.offer(own, hashes)

    def advance(self, num_spare: NumSpare, next_tables: NextTables, *, is_idle: bool) -> None:
        """See WriteBehind; to be called behind each step."""
        if self.states is not None:
            self.states.advance()
        for group, pool, writers in zip(self._pools.groups, self._pools.pools, self._groups, strict=True):
            for writer in writers:
                spare = partial(num_spare, group, pool)
                writer.advance(spare, partial(next_tables, pool), is_idle=is_idle)

    def store_now(self, request: Request) -> None:
        """Store what is computed of a request in one tier, and wait for it: the request is about to lose its blocks.

        With states these are all of its tokens, the partly filled block too; else its full blocks. No block is held for
        a copy afterwards, unless a tier hangs.
        """
        hashes = request.block_hashes[: request.num_indexed_blocks]
        if self.states is not None:
            num_tokens = request.num_computed_tokens
            text = request.hashes.text_hash(request.token_ids, num_tokens)
            if num_tokens % self._pools.block_size:  # this block is not written any more
                self._pools.enter(request.key, len(hashes), [text])
                hashes = [*hashes, text]
            request.num_swapped_tokens = num_tokens
            if num_tokens:
                self.states.store_now(request.key, text, num_tokens)
        for group, pool, writers in zip(self._pools.groups, self._pools.pools, self._groups, strict=True):
            # Only what a window reaches behind the full blocks; some of it may be free already.
            seen = hashes[group.num_passed_blocks(len(hashes) * pool.block_size) :]
            found = [*zip(pool.find_cached(seen), seen, strict=False)]
            is_kept = False
            for writer in writers:
                is_kept = writer.store_now(found, is_kept=is_kept)

    def forget(self, hashes: Collection[BlockHash]) -> None:
        """Drop these contents, which are corrupt."""
        for writer in self._writers:
            writer.tier.drop(hashes)
            writer.forget(hashes)

    def settle(self) -> None:
        """Wait for the end of the batches that are being stored."""
        for writer in self._writers:
            writer.settle()
        if self.states is not None:
            self.states.settle()

    def reset(self, model_fingerprint: str | None) -> None:
        """Drop all content. model_fingerprint: of the weights from now on; None: as before."""
        for tier in self.tiers:
            tier.slots.clear()
            tier.storage.restart(model_fingerprint)
        for writer in self._writers:
            writer.reset()

    def flush(self) -> None:
        """Store what is left in the tiers that outlive the engine, which ends; for a few seconds at most."""
        for writer in self._writers:
            if writer.tier.storage.outlives_engine:
                writer.flush()

    def counters(self) -> dict[str, float]:
        """Return the counters and gauges of each tier, with the names of ``serving.metric_names.WORKER_METRICS``."""
        counted: Counter[str] = Counter()
        for tier in self.tiers:
            counted.update(tier.counters())
        return dict(counted)

    def check_integrity(self) -> None:
        """Assert that each tier's records match the pool's."""
        if self.states is not None:
            self.states.check_integrity()
        for writer in self._writers:
            writer.check_integrity()
