"""Launch the fused kernels on tensors, which are contiguous unless they are called packed."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.fused import triton_kernels

_HEADS_AT_ONCE = 8
_GATE_TILE = 1024


@dataclass(frozen=True)
class HeadNorms:
    """Weights ``[head_dim]`` of the norms over each query's and each key's head (Qwen3)."""

    query: Tensor
    key: Tensor


def normed(states: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add ``added`` to ``states [num_tokens, size]`` in place, and return the norm."""
    num_tokens, size = states.shape
    output = torch.empty_like(states)
    padded = power_of_two(size)
    triton_kernels.norm_kernel[(num_tokens,)](
        states,
        states if added is None else added,
        weight,
        output,
        eps,
        size=size,
        padded=padded,
        has_added=added is not None,
        num_warps=num_warps_of(padded),
    )
    return output


def turned(
    packed: Tensor,
    turn: tuple[Tensor, Tensor],
    norms: HeadNorms | None,
    eps: float,
    sizes: tuple[int, int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value of ``packed [num_tokens, all heads × head_dim]``; the value is a view of it.

    turn: cosine and sine ``[num_tokens, 1, head_dim]``, contiguous. sizes: query heads, KV heads, head_dim.
    """
    num_heads, num_kv_heads, head_dim = sizes
    num_tokens = len(packed)
    num_turned = num_heads + num_kv_heads
    query = packed.new_empty(num_tokens, num_heads, head_dim)
    key = packed.new_empty(num_tokens, num_kv_heads, head_dim)
    triton_kernels.turn_kernel[num_tokens, -(-num_turned // _HEADS_AT_ONCE)](
        packed,
        query,
        key,
        *turn,
        packed if norms is None else norms.query,
        packed if norms is None else norms.key,
        packed.stride(0),
        eps,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        half=power_of_two(head_dim // 2),
        heads=_HEADS_AT_ONCE,
        has_norm=norms is not None,
    )
    return query, key, packed.view(num_tokens, -1, head_dim)[:, num_turned:]


def gated(packed: Tensor) -> Tensor:
    """Return silu(gate) × up, ``[num_tokens, size]``, of ``packed [num_tokens, 2 × size]``."""
    num_tokens = packed.shape[0]
    size = packed.shape[1] // 2
    output = packed.new_empty(num_tokens, size)
    triton_kernels.gate_kernel[num_tokens, -(-size // _GATE_TILE)](packed, output, size=size, tile=_GATE_TILE)
    return output


def power_of_two(size: int) -> int:
    """Return the smallest power of two from ``size`` on."""
    return 1 << (size - 1).bit_length()


def num_warps_of(padded: int) -> int:
    """Return the warps of a row: eight elements per thread, within 4 to 16 warps."""
    return min(16, max(4, padded // 256))
