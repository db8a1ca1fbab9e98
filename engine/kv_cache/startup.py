"""The shape of the KV cache of one layer, and the start-up of the cache in five steps, each logged with its time.

1. ask every rank for the specs of its layers;
2. make every rank measure its free memory (a profiled forward pass without KV);
3. compute each rank's number of blocks, for each group of layers (``contract.cache_layout``);
4. unify to the smallest, so that a block id means the same on all ranks;
5. allocate, then warm up.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import mul
from typing import Any, Protocol, TypeVar

from contract.cache_layout import CacheLayout
from contract.errors import InternalError, SettingError
from contract.layout import DTYPE_BYTES, KEY_VALUE, KVLayout
from engine.kv_cache.shares import StateNeeds, Workload, group_layers, share_memory, share_with_states

logger = logging.getLogger(__name__)

MIN_BLOCKS = 2
"""The null block and one to compute with."""
_ResultT = TypeVar("_ResultT")


@dataclass(frozen=True)
class KVCacheSpec:
    """The KV of one layer.

    parts: what it caches of each token and KV head (``KVLayout``). window: how many tokens a token sees; None: all.
    """

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: str
    parts: tuple[str, ...] = KEY_VALUE
    window: int | None = None

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in this layer: dtype × parts (K and V), each block_size × KV heads × head_size."""
        numbers = self.block_size * self.num_kv_heads * self.head_size
        return len(self.parts) * numbers * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class KVCacheConfig:
    """The allocation of one rank. num_blocks: of each group of ``cache``, in which all layers of a block lie together.

    num_state_slots: of the states of recurrent layers, those of snapshots included. num_spare_slots: the last of them, for
    states before steps with drafts.
    """

    num_blocks: tuple[int, ...]
    cache: CacheLayout
    num_state_slots: int = 0
    num_spare_slots: int = 0

    @property
    def num_bytes(self) -> int:
        """The size of all blocks."""
        sizes = (group.layout.block_bytes for group in self.cache.groups)
        states = self.cache.states
        num_state_bytes = 0 if states is None else self.num_state_slots * states.slot_bytes
        num_kv_bytes: int = sum(map(mul, self.num_blocks, sizes))
        return num_kv_bytes + num_state_bytes

    def max_length(self, max_model_len: int) -> int:
        """Return the tokens of the longest text that fits, ``max_model_len`` at most; windows fit a text of any length."""
        first = self.cache.groups[0]
        return (
            max_model_len
            if first.window
            else min(max_model_len, self.num_blocks[0] * first.layout.block_size)
        )


def block_bytes(specs: Mapping[str, KVCacheSpec]) -> int:
    """Return the bytes of one block over all layers."""
    return sum(spec.block_bytes for spec in specs.values())


def make_config(
    specs: Mapping[str, KVCacheSpec],
    available_bytes: int,
    workload: Workload | None = None,
    states: StateNeeds | None = None,
) -> KVCacheConfig:
    """Return a config of as many blocks as fit. Raises SettingError if fewer than two do, with both numbers of bytes.

    workload: for which memory is shared among layers with different windows; None: each layer keeps all tokens. states:
    those of recurrent layers, which need a workload; a model may have these alone.
    """
    per_block = block_bytes(specs)
    if states is None and available_bytes < MIN_BLOCKS * per_block:
        raise SettingError(
            f"there are {available_bytes} bytes for the KV cache, and {MIN_BLOCKS} blocks of {per_block} bytes "
            f"({MIN_BLOCKS * per_block} bytes) are needed; raise kv_cache_bytes or free memory",
            param="kv_cache_bytes",
        )
    shaped = list(specs.values()) or [KVCacheSpec(states.block_size if states else 1, 1, 1, "float32")]
    layouts = [_layout_of(spec) for spec in shaped]
    windows = [spec.window for spec in specs.values()]
    state_layout = None if states is None else states.layout
    if workload is None:
        if len(set(layouts)) > 1:
            raise SettingError(
                "the layers of this model have KV of different shapes: without windows they cannot share blocks",
                param="model",
            )
        cache = CacheLayout.of(layouts[0], [None] * len(specs))
        return KVCacheConfig((available_bytes // per_block,), cache)
    cache = group_layers(layouts, windows, state_layout, workload.max_model_len)
    if states is None:
        return KVCacheConfig(share_memory(cache, available_bytes, workload), cache)
    num_blocks, num_slots, num_spares = share_with_states(cache, available_bytes, workload, states)
    return KVCacheConfig(num_blocks, cache, num_slots, num_spares)


def _layout_of(spec: KVCacheSpec) -> KVLayout:
    """Return the layout of a block of one layer."""
    return KVLayout(
        num_layers=1,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_size,
        block_size=spec.block_size,
        dtype=spec.dtype,
        parts=spec.parts,
    )


def unify(configs: Sequence[KVCacheConfig]) -> list[KVCacheConfig]:
    """Return the configs with the smallest number of blocks of all ranks. Raises InternalError if they differ otherwise."""
    num_blocks = tuple(map(min, zip(*(config.num_blocks for config in configs), strict=True)))
    num_slots = min(config.num_state_slots for config in configs)
    unified = [replace(config, num_blocks=num_blocks, num_state_slots=num_slots) for config in configs]
    if any(config != unified[0] for config in unified):
        raise InternalError(f"the ranks' KV caches differ: {unified}")
    return unified


class RankGroup(Protocol):
    """All ranks of an engine."""

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """Call the method on every rank; results in rank order."""


def initialize_kv_cache(
    ranks: RankGroup,
    clock: Callable[[], float] = time.monotonic,
    workload: Workload | None = None,
    why_whole: str = "",
    states: StateNeeds | None = None,
) -> tuple[int, int]:
    """Start the KV cache of all ranks; return (device blocks, host blocks), the latter always 0.

    workload, states: see ``make_config``; with several groups, the number of blocks is that of the first one. why_whole: why
    there is no workload. The time of each step is logged, and then that of all together. Raises SettingError if fewer than
    two blocks fit.
    """
    started_at = clock()
    specs = _timed("1/5 specs", clock, lambda: ranks.collective_rpc("get_kv_cache_specs"))
    if workload is None and why_whole and any(spec.window for of_rank in specs for spec in of_rank.values()):
        logger.info("layers with a window keep the KV of all tokens: %s", why_whole)
    available = _timed(
        "2/5 available memory", clock, lambda: ranks.collective_rpc("determine_available_memory")
    )
    configs = _timed(
        "3/5 config per worker",
        clock,
        lambda: [
            make_config(of_rank, free, workload, states)
            for of_rank, free in zip(specs, available, strict=True)
        ],
    )
    config = _timed("4/5 unify", clock, lambda: unify(configs))[0]
    _timed("5/5 allocate", clock, lambda: ranks.collective_rpc("initialize_from_config", config))
    _timed("warm-up", clock, lambda: ranks.collective_rpc("warm_up"))
    logger.info("KV cache: profiling, allocation and warm-up took %.3f s in total", clock() - started_at)
    groups = config.cache.groups
    for group, num_blocks in zip(groups, config.num_blocks, strict=True):
        logger.info(
            "KV cache%s: %d blocks of %d tokens in %s, %d bytes",
            f" of {len(group.layers)} layers, {group.name}" if len(groups) > 1 else "",
            num_blocks,
            group.layout.block_size,
            group.layout.dtype,
            num_blocks * group.layout.block_bytes,
        )
    if states is not None:
        logger.info(
            "states of recurrent layers: %d slots of %d bytes (%d layers), %d of them for snapshots and %d for drafts; %d "
            "bytes",
            config.num_state_slots,
            states.layout.slot_bytes,
            states.layout.num_layers,
            states.num_snapshots,
            config.num_spare_slots,
            config.num_state_slots * states.layout.slot_bytes,
        )
    return config.num_blocks[0], 0


def _timed(name: str, clock: Callable[[], float], step: Callable[[], _ResultT]) -> _ResultT:
    start = clock()
    result = step()
    logger.info("KV cache %s: %.3f s", name, clock() - start)
    return result
