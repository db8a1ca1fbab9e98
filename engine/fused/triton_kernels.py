"""Triton kernels between a decoder's matrix products: norms with their residual, rotary positions, the gate.

Imported only if Triton is installed. Each row is computed in float32 and does not depend on the others. Sizes that are
powers of two (``padded``, ``half``, ``heads``, ``tile``) are tile sizes; the others are the real sizes.
"""

import triton
import triton.language as tl


@triton.jit
def norm_kernel(
    states,
    added,
    weight,
    normed,
    eps,
    size: tl.constexpr,
    padded: tl.constexpr,
    has_added: tl.constexpr,
):
    """Add ``added`` to one token's ``states`` in place, if present, and write the root-mean-square norm to ``normed``."""
    column = tl.arange(0, padded)
    is_column = column < size
    place = tl.program_id(0).to(tl.int64) * size + column
    own = tl.load(states + place, mask=is_column, other=0.0)
    if has_added:
        more = tl.load(added + place, mask=is_column, other=0.0)
        own = (own.to(tl.float32) + more.to(tl.float32)).to(own.dtype)
        tl.store(states + place, own, mask=is_column)
    wide = own.to(tl.float32)
    wide = wide / tl.sqrt(tl.sum(wide * wide, 0) / size + eps)
    scaled = wide.to(own.dtype) * tl.load(weight + column, mask=is_column, other=0.0)
    tl.store(normed + place, scaled, mask=is_column)


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


@triton.jit
def turn_kernel(
    packed,
    query,
    key,
    cos,
    sin,
    query_norm,
    key_norm,
    token_stride,
    eps,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    half: tl.constexpr,
    heads: tl.constexpr,
    has_norm: tl.constexpr,
):
    """Normalize some heads of one token if the model does, and rotate them; queries and keys go to their own outputs.

    packed: queries, keys and values of a token side by side, ``token_stride`` elements. cos, sin ``[num_tokens, head_dim]``.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * heads + tl.arange(0, heads)
    dim = tl.arange(0, half)
    is_dim = dim < head_dim // 2
    is_query = (head < num_heads)[:, None] & is_dim[None, :]
    is_key = ((head >= num_heads) & (head < num_heads + num_kv_heads))[:, None] & is_dim[None, :]
    place = packed + token * token_stride + head[:, None] * head_dim + dim[None, :]
    first = tl.load(place, mask=is_query | is_key, other=0.0).to(tl.float32)
    second = tl.load(place + head_dim // 2, mask=is_query | is_key, other=0.0).to(tl.float32)
    if has_norm:
        first_query, second_query = _head_normed(first, second, query_norm, dim, is_dim, eps, head_dim)
        first_key, second_key = _head_normed(first, second, key_norm, dim, is_dim, eps, head_dim)
        first = tl.where(is_query, first_query, first_key)
        second = tl.where(is_query, second_query, second_key)
    angle_cos = tl.load(cos + token * head_dim + dim, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    angle_sin = tl.load(sin + token * head_dim + dim, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    turned_first = (first * angle_cos - second * angle_sin).to(query.dtype.element_ty)
    turned_second = (second * angle_cos + first * angle_sin).to(query.dtype.element_ty)
    to_query = query + (token * num_heads + head)[:, None] * head_dim + dim[None, :]
    tl.store(to_query, turned_first, mask=is_query)
    tl.store(to_query + head_dim // 2, turned_second, mask=is_query)
    to_key = key + (token * num_kv_heads + head - num_heads)[:, None] * head_dim + dim[None, :]
    tl.store(to_key, turned_first, mask=is_key)
    tl.store(to_key + head_dim // 2, turned_second, mask=is_key)


@triton.jit
def gate_kernel(packed, output, size: tl.constexpr, tile: tl.constexpr):
    """Compute silu(gate) × up (Shazeer 2020) of a tile of one token; ``packed`` has gate and up side by side."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    is_column = column < size
    place = packed + token * 2 * size + column
    gate = tl.load(place, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(place + size, mask=is_column, other=0.0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    tl.store(output + token * size + column, product.to(output.dtype.element_ty), mask=is_column)
