"""The shape of the KV cache of one layer, and the order to a rank to allocate it: metadata only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from contract.errors import InternalError, SettingError
from contract.layout import DTYPE_BYTES, KVLayout

MIN_BLOCKS = 2
"""The null block and one to compute with."""


@dataclass(frozen=True)
class KVCacheSpec:
    """The KV of one layer. use_mla: one fused row a token instead of a key and a value (no served model has it)."""

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: str
    use_mla: bool = False

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in this layer: dtype × (K + V), each block_size × KV heads × head_size."""
        per_kind = self.block_size * self.num_kv_heads * self.head_size * DTYPE_BYTES[self.dtype]
        return per_kind * (1 if self.use_mla else 2)


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
    return KVCacheConfig(num_blocks, _layout(specs))


def unify(configs: Sequence[KVCacheConfig]) -> list[KVCacheConfig]:
    """Return the configs with the smallest number of blocks of all ranks. Raises InternalError if they differ otherwise."""
    num_blocks = min(config.num_blocks for config in configs)
    unified = [replace(config, num_blocks=num_blocks) for config in configs]
    if any(config != unified[0] for config in unified):
        raise InternalError(f"the ranks' KV caches differ: {unified}")
    return unified


def _layout(specs: Mapping[str, KVCacheSpec]) -> KVLayout:
    first, *others = specs.values()
    if first.use_mla or any(spec != first for spec in others):
        raise InternalError("layers with different KV caches, or fused ones, are not served")
    return KVLayout(
        num_layers=len(specs),
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_size,
        block_size=first.block_size,
        dtype=first.dtype,
    )
