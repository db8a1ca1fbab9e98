"""The memory of a KV cache: a region for each group of layers, one behind the other in one allocation.

A region is a pool with blocks of its group's layers, which it numbers by itself; its block 0 is its null block. Behind them
are the slots of the states of recurrent layers.
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
    recurrent layers; None without any.
    """

    def __init__(self, config: KVCacheConfig, device: torch.device) -> None:
        self.config = config
        self.regions, self.states = _allocate(config, device)
        self.first = self.regions[0]
        self.first.other_regions = tuple(self.regions[1:])
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


def _allocate(config: KVCacheConfig, device: torch.device) -> tuple[list[PagedKVMemory], StateMemory | None]:
    layouts = [group.layout for group in config.cache.groups]
    states = config.cache.states
    if len(layouts) == 1 and states is None:
        return [allocate(layouts[0], config.num_blocks[0], device)], None
    regions: list[PagedKVMemory] = []
    sizes = [number * layout.block_bytes for number, layout in zip(config.num_blocks, layouts, strict=True)]
    num_state_bytes = 0 if states is None else config.num_state_slots * states.slot_bytes
    starts = [0]
    for size in (*sizes, num_state_bytes):  # at the start of a page, so that a region can be mapped alone
        starts.append(starts[-1] + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
    if device.type == "cpu":
        pages = HostPages(starts[-1])
        for layout, number, start in zip(layouts, config.num_blocks, starts, strict=False):
            regions.append(MappedKVMemory(layout, number, pages, start))
        flat = torch.frombuffer(pages.view, dtype=torch.uint8)
    else:
        flat = torch.zeros(starts[-1], dtype=torch.uint8, device=device)
        for layout, number, start, size in zip(layouts, config.num_blocks, starts, sizes, strict=False):
            regions.append(StagedKVMemory(layout, number, device, flat[start : start + size]))
    if states is None:
        return regions, None
    own = flat[starts[-2] : starts[-2] + num_state_bytes]
    return regions, StateMemory(states, config.num_state_slots, own, config.num_spare_slots)
