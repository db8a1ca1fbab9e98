"""The blocks of prompts that are handed over, in each group of layers: those that are lent, and those that are received.

Recurrent layers have a slot of each prompt, which both sides have from the beginning, with the first blocks.

A prompt whose KV is lent has blocks for all of it, where all tokens are kept, before its first chunk runs; in a group with
a window it has a promise of as many as it will hold at once (``WindowPool``), and its table grows with the chunks.
"""

from collections.abc import Sequence

from contract.block_hash import BlockHash
from contract.cache_layout import CacheGroup
from contract.state_layout import NO_SLOT
from engine.scheduling.blocks.block_pool import NULL_BLOCK, BlockPool, blocks_needed
from engine.scheduling.blocks.cache_pools import Blocks, CachePools
from engine.scheduling.blocks.window_pool import WindowPool


def allocate_to_lend(pools: CachePools, holder: str, num_new: int, num_chunk: int, cached: Blocks) -> Blocks:
    """Append the blocks of a prompt whose KV is lent: ``num_new`` behind the cached ones, and never more.

    In a group with a window only ``num_chunk`` of them are appended; others follow by ``grow_lent``. Requires
    ``CachePools.can_hold`` of ``num_new`` and ``cached``.
    """
    appended = []
    for group, pool, own in zip(pools.groups, pools.pools, cached, strict=False):
        num_own = num_new
        if isinstance(pool, WindowPool):
            num_blocks = num_new + pool.cost_of(own)
            pool.promise(holder, group.max_blocks(num_blocks * pools.block_size, pools.max_chunk))
            num_own = num_chunk
        appended.append(pool.allocate(holder, num_own, own))
    return (*appended, *pools.allocate_slot(holder, cached))


def grow_lent(pools: CachePools, holder: str, num_blocks: int) -> Blocks:
    """Append promised blocks of a prompt whose KV is lent, up to the first ``num_blocks`` of it; return them."""
    each = [pool.allocate(holder, max(0, num_blocks - pool.num_blocks_of(holder))) for pool in pools.pools]
    return (*each, *pools.empty()[len(each) :])


def last_blocks(pools: CachePools, holder: str, num_tokens: int) -> Blocks:
    """Return what is lent of a holder when the first ``num_tokens``, its whole prompt, are computed.

    Of groups with windows the blocks that the token behind them sees, and the pieces of its slot.
    """
    found = []
    for group, pool in zip(pools.groups, pools.pools, strict=True):
        if group.window is not None:
            places = group.seen_blocks(num_tokens)
            found.append(pool.table_of(holder)[places.start : places.stop])
    if pools.states is not None:
        found.append(pools.states.pieces_of(holder))
    return tuple(found)


def find_received(pools: CachePools, hashes: Sequence[BlockHash]) -> Blocks:
    """Return the blocks of the longest prefix whose KV is here, and need not be received.

    No snapshot is needed, since the states behind the whole prompt are received in any case.
    """
    return pools.find_kv(hashes) if pools.groups[0].layers else ([],)  # then the model has no KV


def plan_received(pools: CachePools, num_tokens: int, cached: Blocks) -> tuple[Blocks, list[int]]:
    """Return what a prompt of which the KV is received needs: of each group the cached blocks, and how many new ones.

    One token more than the prompt has room. Blocks that the token behind the prompt does not see are null blocks.
    """
    num_blocks = blocks_needed(num_tokens + 1, pools.block_size)
    heads = []
    for group, own in zip(pools.groups, cached, strict=True):
        num_passed = group.num_passed_blocks(num_tokens)
        heads.append([NULL_BLOCK] * num_passed + own[num_passed:])
    return tuple(heads), [num_blocks - len(head) for head in heads]


def num_free_blocks(pools: CachePools) -> int:
    """Return how many blocks are free, of all groups together."""
    return sum(pool.num_free_blocks for pool in pools.pools)


def num_promised_blocks(pools: CachePools, group: CacheGroup, others: Sequence[int]) -> int:
    """Return how many blocks of a group some requests need yet. others: see ``CachePools.can_hold``."""
    return sum(group.max_blocks(number * pools.block_size, pools.max_chunk) for number in others)


def can_allocate_each(
    pools: CachePools, numbers: Sequence[int], heads: Blocks, others: Sequence[int]
) -> bool:
    """Return whether each group has so many new blocks behind ``heads``. others: see ``CachePools.can_hold``."""
    if pools.states is not None and pools.states.next_to_receive == NO_SLOT:
        return False
    for group, pool, num_new, own in zip(pools.groups, pools.pools, numbers, heads, strict=True):
        if not pool.can_allocate(num_new + num_promised_blocks(pools, group, others), own):
            return False
    return True


def allocate_each(pools: CachePools, holder: str, numbers: Sequence[int], heads: Blocks) -> Blocks:
    """Append these blocks, and so many taken ones of each group, to the holder's tables; return what was appended.

    The holder gets a slot, if the model has states.
    """
    each = zip(pools.pools, numbers, heads, strict=True)
    tables = tuple([pool.allocate(holder, num_new, own) for pool, num_new, own in each])
    return tables if pools.states is None else (*tables, pools.states.allocate_to_receive(holder))


def received_tables(pools: CachePools, holder: str, tables: Blocks, num_blocks: int) -> Blocks:
    """Return what a prompt of so many blocks is received into: of each group that has bytes, and the pieces of its slot."""
    if pools.states is None:
        return tuple([table[:num_blocks] for table in tables])
    found = zip(pools.groups, tables, strict=False)
    with_bytes = [table[:num_blocks] for group, table in found if group.layers]
    return (*with_bytes, pools.states.pieces_of(holder))


def cut_heads(pools: CachePools, num_tokens: int, num_cached: int) -> list[tuple[BlockPool, int, int]]:
    """Return the blocks of a prompt that is received which windows begin amid: (pool, place, tokens).

    A sender with smaller blocks sends only the end of such a block. num_cached: the first blocks, which were here before.
    tokens: when a text has so many, its window has passed the block.
    """
    heads = []
    for group, pool in zip(pools.groups, pools.pools, strict=True):
        place = group.num_passed_blocks(num_tokens)
        start = place * pools.block_size
        if group.window is not None and place >= num_cached and start + group.window <= num_tokens:
            heads.append((pool, place, start + pools.block_size + group.window - 1))
    return heads


def num_until_whole(pools: CachePools, num_tokens: int, num_cached: int) -> int:
    """Return the number of tokens behind which all windows have passed ``cut_heads``."""
    return max((tokens for _, _, tokens in cut_heads(pools, num_tokens, num_cached)), default=0)


def forget_heads(pools: CachePools, holder: str, num_tokens: int, num_cached: int) -> None:
    """Let the holder's blocks that are ``cut_heads`` not be found by their content, of which they have a part."""
    for pool, place, _ in cut_heads(pools, num_tokens, num_cached):
        pool.forget_content(holder, slice(place, place + 1))


def hand_over(pools: CachePools, holder: str, new_holder: str) -> None:
    """Give all references of ``holder`` to ``new_holder``, which must hold nothing."""
    for pool in pools.pools:
        pool.hand_over(holder, new_holder)
    if pools.states is not None:
        pools.states.hand_over(holder, new_holder)


def quarantine(pools: CachePools, holder: str, num_shared: int) -> None:
    """Keep a holder's blocks until ``release_quarantine``; the first ``num_shared`` of each table are only released."""
    for pool in pools.pools:
        pool.quarantine(holder, num_shared)
    if pools.states is not None:
        pools.states.quarantine(holder)


def release_quarantine(pools: CachePools, holder: str) -> None:
    """Free the quarantined blocks of a holder, if it has any: the last read into them is terminal."""
    if pools.states is not None and pools.first.is_quarantined(holder):
        pools.states.release_quarantine(holder)
    for pool in pools.pools:
        if pool.is_quarantined(holder):
            pool.release_quarantine(holder)
