"""Launch the fused kernels on tensors, which are contiguous unless they are called packed.

One of them has the head norms and rotary positions of a step's queries and keys, and puts its KV in its place; another one
quantises the inputs of an FP8 product.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.backend import AttentionStep, Slots
from engine.compute.staging import overlap_of
from engine.fp8 import triton_kernels as fp8_kernels
from engine.fused import triton_kernels, triton_rope

_GATE_TILE = 1024
_MOST_HEADS = 8
_WARP_ELEMENTS = 256


def add_rms_norm(states: Tensor, added: Tensor | None, weight: Tensor, eps: float) -> Tensor:
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


def silu_and_mul(packed: Tensor) -> Tensor:
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


@dataclass(frozen=True)
class HeadNorms:
    """Weights ``[head_dim]`` of the norms over each query's and each key's head (Qwen3)."""

    query: Tensor
    key: Tensor


@dataclass(frozen=True)
class Heads:
    """The heads of a layer; norms: None if the model has none."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norms: HeadNorms | None
    eps: float


def rotated_heads(
    heads: Heads, packed: Tensor, turn: tuple[Tensor, Tensor], step: AttentionStep, cache: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return query, key and value of ``packed``, with the KV in ``cache`` if there is one; see ``rotate_and_store``.

    Key and value are None if they were stored by the same kernel.
    """
    if cache is not None and step.slots is not None:
        return rotate_and_store(heads, packed, turn, cache, step.slots), None, None
    own = packed.new_empty(len(packed), 2, heads.num_kv_heads, 1, heads.head_dim)
    places = torch.arange(len(packed), dtype=torch.int32, device=packed.device)
    query = rotate_and_store(heads, packed, turn, own, Slots(places, torch.zeros_like(places)))
    key, value = own[:, :, :, 0].unbind(1)
    if cache is not None:
        step.store(key, value, cache)
    return query, key, value


def rotate_and_store(
    heads: Heads, packed: Tensor, turn: tuple[Tensor, Tensor], cache: Tensor, slots: Slots
) -> Tensor:
    """Return the rotated queries of ``packed [num_tokens, all heads × head_dim]``; write the KV into its slots of ``cache``.

    turn: cosine and sine ``[num_tokens, 1, head_dim]``, contiguous. cache: a layer's part of the pool.
    """
    norms = heads.norms
    query = packed.new_empty(len(packed), heads.num_heads, heads.head_dim)
    launch = rope_launch(heads.head_dim)
    num_programs = -(-heads.num_heads // launch["heads"]) - (-heads.num_kv_heads // launch["heads"])
    triton_rope.rope_kernel[len(packed), num_programs](
        packed,
        query,
        cache,
        slots.places,
        slots.num_cleared,
        *turn,
        packed if norms is None else norms.query,
        packed if norms is None else norms.key,
        packed.stride(0),
        *cache.stride()[:3],
        heads.eps,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        half=power_of_two(heads.head_dim // 2),
        block_size=cache.shape[3],
        has_norm=norms is not None,
        **launch,
        **overlap_of(packed.device),
    )
    return query


def rope_launch(head_dim: int) -> dict[str, int]:
    """Return the heads of a program and its warps: one, whose threads each have eight elements of the halves of heads."""
    half = power_of_two(head_dim // 2)
    heads = min(_MOST_HEADS, max(1, _WARP_ELEMENTS // half))
    return {"heads": heads, "num_warps": max(1, heads * half // _WARP_ELEMENTS)}


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
    fp8_kernels.quantise_kernel[(num_tokens,)](
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
