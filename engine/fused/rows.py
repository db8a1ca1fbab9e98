"""Launch the fused kernels on tensors, which are contiguous unless they are called packed."""

import torch
from torch import Tensor

from engine.compute.launching import overlap_of
from engine.fused import triton_kernels

_GATE_TILE = 1024


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
        **overlap_of(states.device),
    )
    return output


def gated(packed: Tensor) -> Tensor:
    """Return silu(gate) × up, ``[num_tokens, size]``, of ``packed [num_tokens, 2 × size]``."""
    num_tokens = packed.shape[0]
    size = packed.shape[1] // 2
    output = packed.new_empty(num_tokens, size)
    triton_kernels.gate_kernel[num_tokens, -(-size // _GATE_TILE)](
        packed, output, size=size, tile=_GATE_TILE, **overlap_of(packed.device)
    )
    return output


def power_of_two(size: int) -> int:
    """Return the smallest power of two from ``size`` on."""
    return 1 << (size - 1).bit_length()


def num_warps_of(padded: int) -> int:
    """Return the warps of a row: eight elements per thread, within 4 to 16 warps."""
    return min(16, max(4, padded // 256))
