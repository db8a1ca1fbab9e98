"""The plan of a load from tiers: of each group of layers the blocks that the next token sees, and the states.

It is all or nothing: a prefix ends where each group has, in its pool or in a tier, what is seen behind it.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from contract.block_hash import BlockHash
from engine.scheduling.blocks.block_pool import NULL_BLOCK
from engine.scheduling.blocks.cache_pools import Blocks, CachePools, prefix_match
from engine.scheduling.requests.request import Request
from engine.scheduling.tiers.kv_tiers import KVTiers
from engine.scheduling.tiers.tier import Tier


class LoadPlan(NamedTuple):
    """The blocks that a load brings.

    hashes: of the blocks of the prefix that the request has then. heads: of each group, the blocks in place of which nothing
    is loaded: those that the pool has, and null blocks where windows have passed. sources: the tiers of the blocks behind
    them. num_tokens: of the prefix. swapped: the tier of the states behind it, if the model has states.
    """

    hashes: Sequence[BlockHash]
    heads: Blocks
    sources: Sequence[Sequence[Tier]]
    num_tokens: int
    swapped: Tier | None = None


def plan_prefix(
    pools: CachePools, tiers: KVTiers, hashes: Sequence[BlockHash], cached: Blocks
) -> LoadPlan | None:
    """Return what tiers have behind the blocks of a prefix that the pools have; None if that is nothing."""
    if not pools.has_windows:
        found = tiers.find(hashes[len(cached[0]) :])
        num_blocks = len(cached[0]) + len(found)
        return LoadPlan(hashes, cached, [found], num_blocks * pools.block_size) if found else None
    in_pools = [pool.find_each_cached(hashes) for pool in pools.pools]
    in_tiers = [list(tiers.find_each(group, hashes)) for group in range(len(pools.pools))]
    found_places = [
        [block or tier is not None for block, tier in zip(*own, strict=True)]
        for own in zip(in_pools, in_tiers, strict=True)
    ]
    num_blocks = prefix_match(pools.groups, found_places)
    num_tokens = num_blocks * pools.block_size
    if num_blocks <= len(cached[0]):
        return None
    return _plan_places(pools, hashes[:num_blocks], num_tokens, in_pools, in_tiers)


def plan_swapped(pools: CachePools, tiers: KVTiers, request: Request) -> LoadPlan | None:
    """Return how a preempted request gets back all that its states had absorbed; None if a part is nowhere."""
    num_tokens = request.num_swapped_tokens
    states = tiers.states
    if states is None or not num_tokens or request.prompt_logprobs.are_missing:
        return None
    text = request.hashes.text_hash(request.token_ids, num_tokens)
    if (tier := states.find(text)) is None:
        return None
    full = request.block_hashes[: num_tokens // pools.block_size]
    rest = [text] if num_tokens % pools.block_size else []
    in_pools: list[list[int]] = []
    in_tiers: list[list[Tier | None]] = []
    for group, pool in zip(pools.groups, pools.pools, strict=True):
        # The partly filled block gets more tokens, so that it cannot be one that others may find.
        in_pools.append([*pool.find_each_cached(full), *(NULL_BLOCK for _ in rest)])
        in_tiers.append(list(tiers.find_each(len(in_tiers), [*full, *rest])) if group.layers else [])
    plan = _plan_places(pools, [*full, *rest], num_tokens, in_pools, in_tiers)
    return plan and plan._replace(swapped=tier)


def _plan_places(
    pools: CachePools,
    hashes: Sequence[BlockHash],
    num_tokens: int,
    in_pools: Sequence[Sequence[int]],
    in_tiers: Sequence[Sequence[Tier | None]],
) -> LoadPlan | None:
    """Return how each group gets what is seen behind these blocks. in_pools, in_tiers: of each block, who has it."""
    num_blocks = len(hashes)
    heads: list[list[int]] = []
    sources: list[list[Tier]] = []
    for group, blocks, tiers in zip(pools.groups, in_pools, in_tiers, strict=True):
        if not group.layers:  # its blocks have no bytes, and none is loaded
            heads.append([])
            sources.append([])
            continue
        num_passed = group.num_passed_blocks(num_tokens)
        head = [NULL_BLOCK] * num_passed + list(takewhile(bool, blocks[num_passed:num_blocks]))
        behind = [tier for tier in tiers[len(head) : num_blocks] if tier is not None]
        if len(behind) < num_blocks - len(head):
            return None  # the pool has some of what is seen, a tier what is before them, and neither all
        heads.append(head)
        sources.append(behind)
    return LoadPlan(hashes, tuple(heads), sources, num_tokens)
