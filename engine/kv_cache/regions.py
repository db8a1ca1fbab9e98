"""The memory of a KV cache: a region for each group of layers, one behind the other in one allocation.

A region is a pool with blocks of its group's layers, which it numbers by itself; its block 0 is its null block. The last one
has the slots of the states of recurrent layers; its blocks are the pieces of slots, and none of them is null.
"""

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kv_cache.memory import HostPages, MappedKVMemory, PagedKVMemory, StagedKVMemory, allocate
from engine.kv_cache.startup import KVCacheConfig
from engine.kv_cache.state_memory import StateMemory


class Regions:
    """Owns the regions of one rank.

    first: the region of the first group, which is all of it if each layer keeps all tokens. layers: of each layer of the
    model that has KV, its part of its region, ``[num_blocks, parts, num_kv_heads, block_size, head_dim]``. states: of the
    recurrent layers; None without any. lent: the first of the regions that are handed over: all that have bytes.
    """

    def __init__(self, config: KVCacheConfig, device: torch.device) -> None:
        self.config = config
        self.regions, slots = _allocate(config, device)
        self.first = self.lent = self.regions[0]
        self.states: StateMemory | None = None
        others = self.regions[1:]
        if slots is not None and config.cache.states is not None:
            sizes = config.num_state_slots, slots.pool, config.num_spare_slots
            states = StateMemory(config.cache.states, *sizes)
            self.states = slots.states = states
            others.append(slots)
        self.first.other_regions = tuple(others)
        if not self.first.layout.block_bytes and slots is not None:
            self.lent = slots
        self.layers = self.first.layers
        if len(self.regions) > 1:
            by_layer: dict[int, Tensor] = {}
            for group, region in zip(config.cache.groups, self.regions, strict=True):
                by_layer.update(zip(group.layers, region.layers, strict=True))
            self.layers = [by_layer[layer] for layer in sorted(by_layer)]

    def copy_blocks(self, copies: Sequence[list[tuple[int, int]]]) -> None:
        """Copy whole blocks in each group, (from, to); see ``PagedKVMemory.copy_blocks``. Behind them, slots of states."""
        for region, pairs in zip(self.regions, copies, strict=False):
            if pairs:
                region.copy_blocks(pairs)
        if self.states is not None:
            self.states.copy(copies[-1])

    def clear_null_blocks(self) -> None:
        """Clear block 0 of each region, to which a step has written."""
        for region in self.regions:
            region.pool[0] = 0

    def close(self) -> None:
        """Free the memory."""
        for region in self.regions:
            region.close()


def _allocate(
    config: KVCacheConfig, device: torch.device
) -> tuple[list[PagedKVMemory], PagedKVMemory | None]:
    """Return the region of each group, and that of the slots, if there are any."""
    layouts = [group.layout for group in config.cache.groups]
    states = config.cache.states
    if len(layouts) == 1 and states is None:
        return [allocate(layouts[0], config.num_blocks[0], device)], None
    numbers = list(config.num_blocks)
    if states is not None:
        layouts.append(states.piece_layout)
        numbers.append(config.num_state_slots * states.num_pieces)
    sizes = [number * layout.block_bytes for number, layout in zip(numbers, layouts, strict=True)]
    starts = [0]
    for size in sizes:  # at the start of a page, so that a region can be mapped alone
        starts.append(starts[-1] + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
    regions: list[PagedKVMemory] = []
    if device.type == "cpu":
        pages = HostPages(starts[-1])
        for layout, number, start in zip(layouts, numbers, starts, strict=False):
            regions.append(MappedKVMemory(layout, number, pages, start))
    else:
        flat = torch.zeros(starts[-1], dtype=torch.uint8, device=device)
        for layout, number, start, size in zip(layouts, numbers, starts, sizes, strict=False):
            regions.append(StagedKVMemory(layout, number, device, flat[start : start + size]))
    if states is None:
        return regions, None
    return regions[:-1], regions[-1]
