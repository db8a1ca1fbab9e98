"""The blocks of prompts that are handed over, in each group of layers: those that are lent, and those that are received.

A prompt whose KV is lent has blocks for all of it, where all tokens are kept, before its first chunk runs; in a group with
a window it has a promise of as many as it will hold at once (``WindowPool``), and its table grows with the chunks.
"""

from collections.abc import Sequence

from contract.cache_layout import CacheGroup
from engine.scheduling.blocks.block_pool import NULL_BLOCK, blocks_needed
from engine.scheduling.blocks.cache_pools import Blocks, CachePools
from engine.scheduling.blocks.window_pool import WindowPool


def allocate_to_lend(pools: CachePools, holder: str, num_new: int, num_chunk: int, cached: Blocks) -> Blocks:
    """Append the blocks of a prompt whose KV is lent: ``num_new`` behind the cached ones, and never more.

    In a group with a window only ``num_chunk`` of them are appended; others follow by ``grow_lent``. Requires
    ``CachePools.can_hold`` of ``num_new`` and ``cached``.
    """
    appended = []
    for group, pool, own in zip(pools.groups, pools.pools, cached, strict=True):
        num_own = num_new
        if isinstance(pool, WindowPool):
            num_blocks = num_new + pool.cost_of(own)
            pool.promise(holder, group.max_blocks(num_blocks * pools.block_size, pools.max_chunk))
            num_own = num_chunk
        appended.append(pool.allocate(holder, num_own, own))
    return tuple(appended)


def grow_lent(pools: CachePools, holder: str, num_blocks: int) -> Blocks:
    """Append promised blocks of a prompt whose KV is lent, up to the first ``num_blocks`` of it; return them."""
    each = [pool.allocate(holder, max(0, num_blocks - pool.num_blocks_of(holder))) for pool in pools.pools]
    return tuple(each)


def seen_blocks(pools: CachePools, holder: str, num_tokens: int) -> Blocks:
    """Return the holder's blocks of the first ``num_tokens`` that the token behind them sees, of groups with windows."""
    found = []
    for group, pool in zip(pools.groups, pools.pools, strict=True):
        if group.window is not None:
            places = group.seen_blocks(num_tokens)
            found.append(pool.table_of(holder)[places.start : places.stop])
    return tuple(found)


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
    for group, pool, num_new, own in zip(pools.groups, pools.pools, numbers, heads, strict=True):
        if not pool.can_allocate(num_new + num_promised_blocks(pools, group, others), own):
            return False
    return True


def allocate_each(pools: CachePools, holder: str, numbers: Sequence[int], heads: Blocks) -> Blocks:
    """Append these blocks, and so many taken ones of each group, to the holder's tables; return what was appended."""
    each = zip(pools.pools, numbers, heads, strict=True)
    return tuple([pool.allocate(holder, num_new, own) for pool, num_new, own in each])


def hand_over(pools: CachePools, holder: str, new_holder: str) -> None:
    """Give all references of ``holder`` to ``new_holder``, which must hold nothing."""
    for pool in pools.pools:
        pool.hand_over(holder, new_holder)


def quarantine(pools: CachePools, holder: str, num_shared: int) -> None:
    """Keep a holder's blocks until ``release_quarantine``; the first ``num_shared`` of each table are only released."""
    for pool in pools.pools:
        pool.quarantine(holder, num_shared)


def release_quarantine(pools: CachePools, holder: str) -> None:
    """Free the quarantined blocks of a holder, if it has any: the last read into them is terminal."""
    for pool in pools.pools:
        if pool.is_quarantined(holder):
            pool.release_quarantine(holder)
