"""The Triton kernel between the product of q, k and v and attention: head norms, rotary positions, and storing KV.

Imported only if Triton is installed.
"""

import triton
import triton.language as tl


@triton.jit
def _head_normed(
    first, second, weight, dim, is_dim, eps, head_dim: tl.constexpr
):  # the halves of some heads, and weights ``[head_dim]``
    scale = 1.0 / tl.sqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / head_dim + eps)
    dtype = weight.dtype.element_ty
    low = tl.load(weight + dim, mask=is_dim, other=0.0)[None, :]
    high = tl.load(weight + head_dim // 2 + dim, mask=is_dim, other=0.0)[None, :]
    normed_first = (first * scale[:, None]).to(dtype) * low
    normed_second = (second * scale[:, None]).to(dtype) * high
    return normed_first.to(tl.float32), normed_second.to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=["slots", "num_cleared"])
def rope_kernel(
    packed,
    query,
    cache,
    slots,
    num_cleared,
    cos,
    sin,
    query_norm,
    key_norm,
    token_stride,
    block_stride,
    kv_stride,
    head_stride,
    eps,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    half: tl.constexpr,
    block_size: tl.constexpr,
    heads: tl.constexpr,
    has_norm: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Normalize some heads of one token if the model does, and rotate them: queries into ``query``, keys into their slot.

    A program has ``heads`` query heads, or keys and values of as many KV heads; the latter zeroes ``num_cleared`` slots
    behind the token's. A slot below 0 is skipped. packed: queries, keys and values of a token side by side,
    ``token_stride`` elements. cos, sin ``[num_tokens, head_dim]``.
    """
    if overlaps:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    num_behind = tl.load(num_cleared + token)
    if overlaps:
        tl.extra.cuda.gdc_wait()
    turn = token * head_dim
    own = packed + token * token_stride
    num_query_programs: tl.constexpr = (num_heads + heads - 1) // heads
    if tl.program_id(1) < num_query_programs:
        head = tl.program_id(1) * heads + tl.arange(0, heads)
        first, second, place, mask = _turned(
            own, cos + turn, sin + turn, query_norm, eps, head, num_heads, head_dim, half, has_norm
        )
        _store_halves(query + token * num_heads * head_dim + place, first, second, mask, head_dim)
    elif slot >= 0:
        head = (tl.program_id(1) - num_query_programs) * heads + tl.arange(0, heads)
        keys = own + num_heads * head_dim
        first, second, place, mask = _turned(
            keys, cos + turn, sin + turn, key_norm, eps, head, num_kv_heads, head_dim, half, has_norm
        )
        values = keys + num_kv_heads * head_dim + place
        low = tl.load(values, mask=mask)
        high = tl.load(values + head_dim // 2, mask=mask)
        to_key = cache + (slot // block_size).to(tl.int64) * block_stride + (slot % block_size) * head_dim
        to_key += head[:, None] * head_stride + tl.arange(0, half)[None, :]
        _store_halves(to_key, first, second, mask, head_dim)
        _store_halves(to_key + kv_stride, low, high, mask, head_dim)
        _clear(to_key, kv_stride, num_behind, mask, heads, half, head_dim)


@triton.jit
def _turned(
    states,
    cos,
    sin,
    norm,
    eps,
    head,
    count,
    head_dim: tl.constexpr,
    half: tl.constexpr,
    has_norm: tl.constexpr,
):
    """Return the halves of some of a token's ``count`` heads, normalized and rotated; where the first lie, and which do."""
    dim = tl.arange(0, half)
    is_dim = dim < head_dim // 2
    mask = (head < count)[:, None] & is_dim[None, :]
    place = head[:, None] * head_dim + dim[None, :]
    first = tl.load(states + place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(states + head_dim // 2 + place, mask=mask, other=0.0).to(tl.float32)
    if has_norm:
        first, second = _head_normed(first, second, norm, dim, is_dim, eps, head_dim)
    angle_cos = tl.load(cos + dim, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    angle_sin = tl.load(sin + dim, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    return first * angle_cos - second * angle_sin, second * angle_cos + first * angle_sin, place, mask


@triton.jit
def _clear(place, kv_stride, count, mask, heads: tl.constexpr, half: tl.constexpr, head_dim: tl.constexpr):
    """Write zeros into the ``count`` slots behind a token's keys and values."""
    zeros = tl.zeros([heads, half], dtype=tl.float32)
    for behind in range(1, count + 1):
        _store_halves(place + behind * head_dim, zeros, zeros, mask, head_dim)
        _store_halves(place + kv_stride + behind * head_dim, zeros, zeros, mask, head_dim)


@triton.jit
def _store_halves(place, first, second, mask, head_dim: tl.constexpr):
    """Write both halves of heads, rounded to the number format of their place."""
    tl.store(place, first.to(place.dtype.element_ty), mask=mask)
    tl.store(place + head_dim // 2, second.to(place.dtype.element_ty), mask=mask)
