"""Store a step's KV in the pool by our Triton kernel, for every backend that uses the pool's own layout."""

from torch import Tensor

from engine.attention import triton_kernels
from engine.attention.backend import Slots
from engine.attention.triton_sizes import store_launch


def store_kv(key: Tensor, value: Tensor, cache: Tensor, slots: Slots) -> None:
    """Write a step's KV into a layer's part of the pool."""
    key = _with_heads_together(key)
    value = _with_heads_together(value)
    num_tokens, num_kv_heads, head_dim = key.shape
    triton_kernels.store_kernel[(num_tokens,)](
        key,
        value,
        cache,
        slots.places,
        slots.num_cleared,
        key.stride(0),
        value.stride(0),
        *cache.stride()[:3],
        num_kv_heads=num_kv_heads,
        block_size=cache.shape[3],
        head_dim=head_dim,
        **store_launch(num_kv_heads, head_dim),
    )


def _with_heads_together(states: Tensor) -> Tensor:
    """Return ``states`` if each token's heads are contiguous, else a copy."""
    return states if states[0].is_contiguous() else states.contiguous()
