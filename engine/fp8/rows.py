"""Launch the kernel that quantises the inputs of a product."""

import torch
from torch import Tensor

from engine.fp8 import triton_kernels
from engine.fused.rows import num_warps_of, power_of_two


def quantised(
    states: Tensor, input_scale: Tensor | None, largest: float, smallest: float
) -> tuple[Tensor, Tensor]:
    """Return FP8 numbers of ``states [num_tokens, size]`` and the scale of each row, ``[num_tokens, 1]``.

    input_scale: the scale ``[1]`` of all rows; None: each has its own, which is ``smallest`` or more.
    """
    states = states.contiguous()
    num_tokens, size = states.shape
    numbers = torch.empty_like(states, dtype=torch.float8_e4m3fn)
    scales = states.new_empty(num_tokens, 1, dtype=torch.float32)
    padded = power_of_two(size)
    triton_kernels.quantise_kernel[(num_tokens,)](
        states,
        scales if input_scale is None else input_scale,
        numbers,
        scales,
        largest,
        smallest,
        size=size,
        padded=padded,
        is_fixed=input_scale is not None,
        num_warps=num_warps_of(padded),
    )
    return numbers, scales
