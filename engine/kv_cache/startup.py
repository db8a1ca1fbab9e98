"""The shape of the KV cache of one layer, and the start-up of the cache in five steps, each logged with its time.

1. ask every rank for the specs of its layers;
2. make every rank measure its free memory (a profiled forward pass without KV);
3. compute each rank's number of blocks;
4. unify to the smallest, so that a block id means the same on all ranks;
5. allocate, then warm up.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from contract.errors import InternalError, SettingError
from contract.layout import DTYPE_BYTES, KEY_VALUE, KVLayout

logger = logging.getLogger(__name__)

MIN_BLOCKS = 2
"""The null block and one to compute with."""
_ResultT = TypeVar("_ResultT")


@dataclass(frozen=True)
class KVCacheSpec:
    """The KV of one layer. parts: what it caches of each token and KV head (``KVLayout``)."""

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: str
    parts: tuple[str, ...] = KEY_VALUE

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in this layer: dtype × parts (K and V), each block_size × KV heads × head_size."""
        numbers = self.block_size * self.num_kv_heads * self.head_size
        return len(self.parts) * numbers * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class KVCacheConfig:
    """The allocation of one rank: ``num_blocks`` blocks of ``layout`` (all layers of a block lie together)."""

    num_blocks: int
    layout: KVLayout


def block_bytes(specs: Mapping[str, KVCacheSpec]) -> int:
    """Return the bytes of one block over all layers."""
    return sum(spec.block_bytes for spec in specs.values())


def make_config(specs: Mapping[str, KVCacheSpec], available_bytes: int) -> KVCacheConfig:
    """Return a config of as many blocks as fit. Raises SettingError if fewer than two do, with both numbers of bytes."""
    per_block = block_bytes(specs)
    num_blocks = available_bytes // per_block
    if num_blocks < MIN_BLOCKS:
        raise SettingError(
            f"there are {available_bytes} bytes for the KV cache, and {MIN_BLOCKS} blocks of {per_block} bytes "
            f"({MIN_BLOCKS * per_block} bytes) are needed; raise kv_cache_bytes or free memory",
            param="kv_cache_bytes",
        )
    first, *others = specs.values()
    if any(spec != first for spec in others):
        raise InternalError("layers with different KV caches are not served")
    layout = KVLayout(
        num_layers=len(specs),
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_size,
        block_size=first.block_size,
        dtype=first.dtype,
        parts=first.parts,
    )
    return KVCacheConfig(num_blocks, layout)


def unify(configs: Sequence[KVCacheConfig]) -> list[KVCacheConfig]:
    """Return the configs with the smallest number of blocks of all ranks. Raises InternalError if they differ otherwise."""
    num_blocks = min(config.num_blocks for config in configs)
    unified = [replace(config, num_blocks=num_blocks) for config in configs]
    if any(config != unified[0] for config in unified):
        raise InternalError(f"the ranks' KV caches differ: {unified}")
    return unified


class RankGroup(Protocol):
    """All ranks of an engine."""

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """Call the method on every rank; results in rank order."""


def initialize_kv_cache(ranks: RankGroup, clock: Callable[[], float] = time.monotonic) -> tuple[int, int]:
    """Start the KV cache of all ranks; return (device blocks, host blocks), the latter always 0.

    The time of each step is logged, and then that of all together. Raises SettingError if fewer than two blocks fit.
    """
    started_at = clock()
    specs = _timed("1/5 specs", clock, lambda: ranks.collective_rpc("get_kv_cache_specs"))
    available = _timed(
        "2/5 available memory", clock, lambda: ranks.collective_rpc("determine_available_memory")
    )
    configs = _timed(
        "3/5 config per worker",
        clock,
        lambda: [make_config(of_rank, free) for of_rank, free in zip(specs, available, strict=True)],
    )
    unified = _timed("4/5 unify", clock, lambda: unify(configs))
    _timed("5/5 allocate", clock, lambda: ranks.collective_rpc("initialize_from_config", unified[0]))
    _timed("warm-up", clock, lambda: ranks.collective_rpc("warm_up"))
    logger.info("KV cache: profiling, allocation and warm-up took %.3f s in total", clock() - started_at)
    config = unified[0]
    logger.info(
        "KV cache: %d blocks of %d tokens in %s, %d bytes", config.num_blocks, config.layout.block_size,
        config.layout.dtype, config.num_blocks * config.layout.block_bytes,
    )  # fmt: skip
    return config.num_blocks, 0


def _timed(name: str, clock: Callable[[], float], step: Callable[[], _ResultT]) -> _ResultT:
    start = clock()
    result = step()
    logger.info("KV cache %s: %.3f s", name, clock() - start)
    return result
