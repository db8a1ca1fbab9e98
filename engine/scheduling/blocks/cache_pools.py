"""The blocks of all groups of layers (``contract.cache_layout``): a request holds some of each group, or of none.

The tables of a request are equally long in all groups, so that the block of a position is in the same place of each. In a
group with a window the first ones are the null block, as soon as no later token sees them. A prefix can be reused if each
group has what the next token sees of it.

Recurrent layers have a slot of each request in place of blocks. It is the last list of ``Blocks``, and has no places.
"""

from collections import Counter
from collections.abc import Collection, Sequence

from contract.block_hash import BlockHash
from contract.cache_layout import CacheGroup
from contract.state_layout import NO_SLOT
from engine.scheduling.blocks.block_pool import NULL_BLOCK, BlockPool
from engine.scheduling.blocks.state_slots import StateSlots
from engine.scheduling.blocks.state_snapshots import StateSnapshots
from engine.scheduling.blocks.window_pool import WindowPool

Blocks = tuple[list[int], ...]
"""A part of a request's table in each group, of equal lengths. In an engine with states its slot follows, if it is new."""


def prefix_match(
    groups: Sequence[CacheGroup], found: Sequence[Sequence[int]], snapshots: Sequence[int] | None = None
) -> int:
    """Return the number of blocks of the longest prefix that can be reused.

    found: of each group, the cached block of each place; the null block where there is none. A group needs those blocks
    that the first token behind the prefix sees, or a later one: all, or with a window only the last ones. snapshots: the
    slot of a state behind the block of each place, without which no prefix ends there; None: the model has no states.
    """
    num_places = len(found[0])
    is_usable = [True, *(slot != NO_SLOT for slot in snapshots or [True] * num_places)]
    for group, blocks in zip(groups, found, strict=True):
        size = group.layout.block_size
        num_found = 0  # cached blocks in a row, up to this place
        for end, block in enumerate(blocks, 1):
            num_found = 0 if block == NULL_BLOCK else num_found + 1
            if num_found < end - group.num_passed_blocks(end * size):
                is_usable[end] = False
    return max(end for end, usable in enumerate(is_usable) if usable)


def prefix_of(groups: Sequence[CacheGroup], found: Sequence[Sequence[int]], num_blocks: int) -> Blocks:
    """Return the blocks of a prefix in each group, without those that a window has passed. found: see ``prefix_match``."""
    blocks: list[list[int]] = []
    for group, own in zip(groups, found, strict=True):
        num_passed = group.num_passed_blocks(num_blocks * group.layout.block_size)
        blocks.append([NULL_BLOCK] * num_passed + list(own[num_passed:num_blocks]))
    return tuple(blocks)


def pool_of(group: CacheGroup, num_blocks: int, *, enable_prefix_caching: bool = True) -> BlockPool:
    """Return a new pool for a group."""
    kind = BlockPool if group.window is None else WindowPool
    return kind(num_blocks, group.layout.block_size, enable_prefix_caching=enable_prefix_caching)


class CachePools:
    """A pool for each group. What it does, it does in all of them; see BlockPool for the contracts.

    groups, pools: the same number of both, with equal block sizes. max_chunk: the most tokens of one request in a step.
    first: the pool of the first group, of which the lengths of all tables can be read. has_windows: ``free_behind`` may free
    something. states: the slots of recurrent layers; None without any. num_tables: of a request.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        pools: Sequence[BlockPool],
        max_chunk: int,
        states: StateSlots | None = None,
    ) -> None:
        sizes = {group.layout.block_size for group in groups} | {pool.block_size for pool in pools}
        if len(sizes) != 1:
            raise ValueError(f"the groups have blocks of {sorted(sizes)} tokens; only equal sizes are served")
        self.groups = tuple(groups)
        self.pools = list(pools)
        self.first = pools[0]
        self.block_size = self.first.block_size
        self._windows = [index for index, group in enumerate(groups) if group.window is not None]
        self.has_windows = bool(self._windows)
        self.max_chunk = max_chunk
        self.states = states
        self.num_tables = len(pools) + (states is not None)

    def max_length(self, max_model_len: int) -> int:
        """Return the tokens of the longest text that has room here, ``max_model_len`` at most."""
        if self.groups[0].window is not None:
            return max_model_len  # not more than its window and a chunk are kept
        return min(max_model_len, self.first.num_usable_blocks * self.block_size)

    @property
    def snapshots(self) -> StateSnapshots | None:
        """The snapshots of states; None without any."""
        return None if self.states is None else self.states.snapshots

    def empty(self) -> Blocks:
        """Return no blocks of each group, to which some may be added."""
        return tuple([[] for _ in range(self.num_tables)])

    @property
    def usage(self) -> float:
        """The share of usable blocks, or of slots, that are not free, 0..1, in the group that has the fewest left."""
        usage = max(pool.usage for pool in self.pools)
        return usage if self.states is None else max(usage, self.states.usage)

    def find_cached(self, hashes: Sequence[BlockHash]) -> Blocks:
        """Return the blocks of the longest prefix that all groups can serve. They are valid until a pool changes.

        With states a snapshot of them must be there, too; its slot is the last list.
        """
        if self.states is None:
            return self.find_kv(hashes)
        if (snapshots := self.snapshots) is None:
            return self.empty()
        found = [pool.find_each_cached(hashes) for pool in self.pools]
        slots = list(map(snapshots.find, hashes))
        num_blocks = prefix_match(self.groups, found, slots)
        if not num_blocks:
            return self.empty()
        snapshots.use(hashes[num_blocks - 1])
        return (*prefix_of(self.groups, found, num_blocks), [slots[num_blocks - 1]])

    def find_kv(self, hashes: Sequence[BlockHash]) -> Blocks:
        """Return the blocks of the longest prefix that all groups can serve, whatever there is of its states."""
        if not self._windows:  # then this is the only group
            return (self.first.find_cached(hashes),)
        found = [pool.find_each_cached(hashes) for pool in self.pools]
        return prefix_of(self.groups, found, prefix_match(self.groups, found))

    def can_allocate(self, num_new: int, cached: Blocks | None = None) -> bool:
        """Return whether ``allocate`` with the same arguments may be called, for a holder that has a slot."""
        tables = cached or [()] * len(self.pools)
        return all(pool.can_allocate(num_new, own) for pool, own in zip(self.pools, tables, strict=False))

    def can_hold(self, num_new: int, cached: Blocks | None = None, others: Sequence[int] = ()) -> bool:
        """Return whether a request could be computed by chunks to the end of ``num_new`` more blocks, if no other grew.

        others: how many blocks each of some requests lacks, for which there must be room as well. With a window a request
        keeps a part of its blocks only. The request has no slot yet, the others have theirs.
        """
        if self.states is not None and not self.states.num_free:
            return False
        tables = cached or [()] * len(self.pools)
        for group, pool, own in zip(self.groups, self.pools, tables, strict=False):
            num_needed = 0
            for num_blocks in (num_new + pool.cost_of(own), *others):
                num_needed += group.max_blocks(num_blocks * self.block_size, self.max_chunk)
            if num_needed > pool.num_available_blocks:
                return False
        return True

    def allocate(self, holder: str, num_new: int, cached: Blocks | None = None) -> Blocks:
        """Append cached blocks and ``num_new`` taken ones to the holder's tables; return what was appended.

        A holder without a slot gets one.
        """
        tables = cached or [()] * len(self.pools)
        new = [pool.allocate(holder, num_new, own) for pool, own in zip(self.pools, tables, strict=False)]
        if self.states is not None:
            new += self.allocate_slot(holder, cached)
        return tuple(new)

    def allocate_slot(self, holder: str, cached: Blocks | None) -> list[list[int]]:
        """Give a slot to a holder without one, with the snapshot behind its cached blocks; return that part of Blocks."""
        if self.states is None:
            return []
        new = self.states.allocate(holder)
        if cached and cached[-1]:
            self.states.restore(holder, cached[-1][0])
        return [new]

    def note_computed(
        self, holder: str, num_tokens: int, num_prompt_tokens: int, hashes: list[BlockHash]
    ) -> None:
        """Free what no later token sees, and save the state if that is due. hashes: of the holder's full blocks."""
        self.free_behind(holder, num_tokens)
        if self.states is not None:
            self.states.save(holder, num_tokens, num_prompt_tokens, hashes)

    def free_behind(self, holder: str, num_tokens: int) -> None:
        """Free the blocks that no token from position ``num_tokens`` on sees: all before are computed, and stay."""
        for index in self._windows:
            self.pools[index].free_behind(holder, self.groups[index].num_passed_blocks(num_tokens))

    def tables_of(self, holder: str) -> Blocks:
        """Return the holder's tables (copies), and its slot; empty ones for one that holds nothing."""
        tables = [pool.table_of(holder) for pool in self.pools]
        if self.states is not None:
            tables.append(self.states.table_of(holder))
        return tuple(tables)

    def shared_by_fork(self, holder: str, num_full: int) -> Blocks:
        """Return the holder's first ``num_full`` blocks of each group, which a fork may share. It shares no state."""
        shared = [pool.table_of(holder)[:num_full] for pool in self.pools]
        return (*shared, *self.empty()[len(shared) :])

    def enter(self, holder: str, start: int, hashes: Sequence[BlockHash]) -> Blocks:
        """Let the holder's blocks from its ``start``-th on be found by content; return them."""
        return tuple([pool.enter(holder, start, hashes) for pool in self.pools])

    def forget_content(self, holder: str, hashes: Sequence[BlockHash] = ()) -> None:
        """Let the content of the holder's blocks, which is corrupt, not be found any more. hashes: of these."""
        for pool in self.pools:
            pool.forget_content(holder)
        if self.snapshots is not None:
            self.snapshots.forget(hashes)

    def free(self, holder: str) -> None:
        """Drop all references of the holder."""
        for pool in self.pools:
            pool.free(holder)
        if self.states is not None:
            self.states.free(holder)

    def reset_prefix_cache(self) -> bool:
        """Drop all content. Returns False, and does nothing, while a block is not free."""
        if any(pool.num_free_blocks != pool.num_usable_blocks for pool in self.pools):
            return False
        for pool in self.pools:
            pool.reset_prefix_cache()
        if self.snapshots is not None:
            self.snapshots.clear()
        return True

    def count_by_state(self) -> dict[str, int]:
        """Return the number of blocks in each state, of all groups together."""
        counts = [pool.count_by_state() for pool in self.pools]
        return {state: sum(count[state] for count in counts) for state in counts[0]}

    def holders(self) -> dict[str, int]:
        """Return how many blocks each holder holds, of all groups together."""
        counts: Counter[str] = Counter()
        for pool in self.pools:  # a copy to a KV tier has blocks of one
            counts.update(pool.holders())
        return dict(counts)

    def check_integrity(self, lent: Collection[str] = (), copies: Collection[str] = ()) -> None:
        """Check each pool, that a holder has tables of equal length, and a slot. Raises AssertionError.

        lent: holders of blocks of prompts that are lent; one of them may have ended between two of its chunks. copies: those
        of blocks of one group, or of a slot, that are copied to KV tiers.
        """
        for pool in self.pools:
            pool.check_integrity()
        holders = {holder for pool in self.pools for holder in pool.holders()}.difference(copies)
        for holder in holders:
            windows = (pool for pool in self.pools if isinstance(pool, WindowPool))
            if holder in lent or any(pool.has_promise(holder) for pool in windows):
                continue  # its table in a window's pool grows with its chunks
            lengths = {pool.num_blocks_of(holder) for pool in self.pools}
            assert len(lengths) == 1, f"{holder}: unequal tables"
        if self.states is not None:
            self.states.check_integrity()
            assert self.states.holders().difference(copies) == holders, (
                "a request has blocks without a slot, or a slot without blocks"
            )
