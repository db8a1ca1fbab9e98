"""Head norms and rotary positions of a step's queries and keys, and the place of its KV: one kernel."""

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.attention.backend import AttentionStep, Slots
from engine.compute.launching import overlap_of
from engine.fused import triton_turn
from engine.fused.rows import power_of_two

_MOST_HEADS = 8
_WARP_ELEMENTS = 256


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


def turned(
    heads: Heads,
    packed: Tensor,
    turn: tuple[Tensor, Tensor],
    step: AttentionStep,
    cache: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return query, key and value of ``packed``, with the KV in ``cache`` if there is one; see ``store_turned``.

    Key and value are None if they were stored by the same kernel.
    """
    if cache is not None and step.slots is not None:
        return store_turned(heads, packed, turn, cache, step.slots), None, None
    own = packed.new_empty(len(packed), 2, heads.num_kv_heads, 1, heads.head_dim)
    places = torch.arange(len(packed), dtype=torch.int32, device=packed.device)
    query = store_turned(heads, packed, turn, own, Slots(places, torch.zeros_like(places)))
    key, value = own[:, :, :, 0].unbind(1)
    if cache is not None:
        step.store(key, value, cache)
    return query, key, value


def store_turned(
    heads: Heads, packed: Tensor, turn: tuple[Tensor, Tensor], cache: Tensor, slots: Slots
) -> Tensor:
    """Return the rotated queries of ``packed [num_tokens, all heads × head_dim]``; write the KV into its slots of ``cache``.

    turn: cosine and sine ``[num_tokens, 1, head_dim]``, contiguous. cache: a layer's part of the pool.
    """
    norms = heads.norms
    query = packed.new_empty(len(packed), heads.num_heads, heads.head_dim)
    launch = turn_launch(heads.head_dim)
    num_programs = -(-heads.num_heads // launch["heads"]) - (-heads.num_kv_heads // launch["heads"])
    triton_turn.turn_kernel[len(packed), num_programs](
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


def turn_launch(head_dim: int) -> dict[str, int]:
    """Return the heads of a program and its warps: one, whose threads each have eight elements of the halves of heads."""
    half = power_of_two(head_dim // 2)
    heads = min(_MOST_HEADS, max(1, _WARP_ELEMENTS // half))
    return {"heads": heads, "num_warps": max(1, heads * half // _WARP_ELEMENTS)}
