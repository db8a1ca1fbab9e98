"""Triton kernels over the paged KV cache: store, prefill, decode in splits of the context, and their combination.

Imported only if Triton is installed. Sizes that are powers of two are padded heads, head dims and tiles; ``head_dim`` and
``group`` are the real sizes. Scores are in base 2: ``scale`` includes log2(e). The result of a row does not depend on other
rows.
"""

import triton
import triton.language as tl

_VECTORS = ["slots", "num_cleared", "tiles", "rows", "query_starts", "seq_lens", "tables"]
_STRIDES = ["table_stride"]
"""They differ from step to step: a kernel must not be compiled anew for those that are aligned, and those that are not."""


@triton.jit(do_not_specialize=_STRIDES, do_not_specialize_on_alignment=_VECTORS)
def store_kernel(
    key,
    value,
    cache,
    slots,
    num_cleared,
    key_stride,
    value_stride,
    block_stride,
    kv_stride,
    head_stride,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    dims: tl.constexpr,
):
    """Write key and value of one token and KV head, then zero ``num_cleared`` slots. A slot below 0 is skipped.

    key_stride, value_stride: elements from one token's heads to the next token's.
    """
    token = tl.program_id(0)
    head = tl.program_id(1)
    slot = tl.load(slots + token)
    if slot >= 0:
        block = (slot // block_size).to(tl.int64)
        dim = tl.arange(0, dims)
        is_dim = dim < head_dim
        source = head * head_dim + dim
        from_key = key + token.to(tl.int64) * key_stride + source
        from_value = value + token.to(tl.int64) * value_stride + source
        place = cache + block * block_stride + head * head_stride + (slot % block_size) * head_dim + dim
        tl.store(place, tl.load(from_key, mask=is_dim), mask=is_dim)
        tl.store(place + kv_stride, tl.load(from_value, mask=is_dim), mask=is_dim)
        zeros = tl.zeros([dims], dtype=cache.dtype.element_ty)
        for behind in range(1, tl.load(num_cleared + token) + 1):
            tl.store(place + behind * head_dim, zeros, mask=is_dim)
            tl.store(place + kv_stride + behind * head_dim, zeros, mask=is_dim)


@triton.jit
def _fold(
    query,
    query_positions,
    highest,
    total,
    mixed,
    start,
    seq_len,
    table,
    keys,
    kv_stride,
    block_stride,
    scale,
    window: tl.constexpr,
    cap: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    dims: tl.constexpr,
    tile: tl.constexpr,
    precision: tl.constexpr,
):
    """Add the KV of ``tile`` positions from ``start`` to the running softmax (Milakov and Gimelshein 2018)."""
    positions = start + tl.arange(0, tile)
    is_there = positions < seq_len
    dim = tl.arange(0, dims)
    blocks = tl.load(table + positions // block_size, mask=is_there, other=0).to(tl.int64)
    places = keys + blocks * block_stride + (positions % block_size) * head_dim
    key_mask = is_there[None, :] & (dim < head_dim)[:, None]
    key = tl.load(places[None, :] + dim[:, None], mask=key_mask, other=0.0)
    scores = tl.dot(query, key, input_precision=precision) * scale
    if cap > 0.0:
        scores = cap * (2.0 * tl.sigmoid(2.0 * scores / cap) - 1.0)  # cap × tanh(scores / cap)
    is_seen = is_there[None, :] & (positions[None, :] <= query_positions[:, None])
    if window > 0:
        is_seen = is_seen & (positions[None, :] > query_positions[:, None] - window)
    scores = tl.where(is_seen, scores, -1.0e30)
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.where(is_seen, tl.exp2(scores - new_highest[:, None]), 0.0)
    decay = tl.exp2(highest - new_highest)
    value_mask = is_there[:, None] & (dim < head_dim)[None, :]
    value = tl.load(places[:, None] + kv_stride + dim[None, :], mask=value_mask, other=0.0)
    mixed = mixed * decay[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=precision)
    return new_highest, total * decay + tl.sum(weights, 1), mixed


@triton.jit(do_not_specialize=_STRIDES, do_not_specialize_on_alignment=_VECTORS)
def prefill_kernel(
    query,
    output,
    cache,
    tiles,
    query_starts,
    seq_lens,
    tables,
    table_stride,
    token_stride,
    block_stride,
    kv_stride,
    head_stride,
    scale,
    group: tl.constexpr,
    window: tl.constexpr,
    cap: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    dims: tl.constexpr,
    tokens: tl.constexpr,
    parts: tl.constexpr,
    tile: tl.constexpr,
    precision: tl.constexpr,
):
    """Compute one head for ``tokens`` queries. tiles ``[num_tiles, 2]``: request, and first token of ``parts`` programs."""
    head = tl.program_id(0)
    index = tl.program_id(1) // parts
    row = tl.load(tiles + 2 * index)
    first = tl.load(tiles + 2 * index + 1) + (tl.program_id(1) % parts) * tokens
    query_start = tl.load(query_starts + row)
    seq_len = tl.load(seq_lens + row)
    count = tl.load(query_starts + row + 1) - query_start
    own = first + tl.arange(0, tokens)
    positions = seq_len - count + own
    dim = tl.arange(0, dims)
    places = (query_start + own).to(tl.int64)[:, None] * token_stride + head * head_dim + dim[None, :]
    mask = (own < count)[:, None] & (dim < head_dim)[None, :]
    states = tl.load(query + places, mask=mask, other=0.0)
    begin = 0
    if window > 0:
        begin = tl.maximum(seq_len - count + first - window + 1, 0) // tile * tile
    end = tl.where(first < count, tl.minimum(seq_len - count + first + tokens, seq_len), begin)
    highest = tl.full([tokens], -1.0e30, dtype=tl.float32)
    total = tl.zeros([tokens], dtype=tl.float32)
    mixed = tl.zeros([tokens, dims], dtype=tl.float32)
    table = tables + row.to(tl.int64) * table_stride
    keys = cache + (head // group) * head_stride
    for start in range(begin, end, tile):
        highest, total, mixed = _fold(
            states, positions, highest, total, mixed, start, seq_len, table, keys, kv_stride, block_stride,
            scale, window, cap, block_size, head_dim, dims, tile, precision,
        )  # fmt: skip
    total = tl.where(own < count, total, 1.0)
    tl.store(output + places, (mixed / total[:, None]).to(output.dtype.element_ty), mask=mask)


@triton.jit
def _split_of(
    seq_len, window: tl.constexpr, tile: tl.constexpr, num_splits: tl.constexpr, shortest: tl.constexpr
):
    """Return the start of the visible context and the tokens per split, by the sequence's length only."""
    begin = 0
    if window > 0:
        begin = tl.maximum(seq_len - window, 0) // tile * tile
    even = tl.cdiv(tl.cdiv(seq_len - begin, num_splits), tile) * tile
    return begin, tl.maximum(even, shortest)


@triton.jit(do_not_specialize=_STRIDES, do_not_specialize_on_alignment=_VECTORS)
def decode_kernel(
    query,
    partial,
    logs,
    cache,
    rows,
    query_starts,
    seq_lens,
    tables,
    table_stride,
    token_stride,
    block_stride,
    kv_stride,
    head_stride,
    scale,
    group: tl.constexpr,
    heads: tl.constexpr,
    window: tl.constexpr,
    cap: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    dims: tl.constexpr,
    tile: tl.constexpr,
    num_splits: tl.constexpr,
    shortest: tl.constexpr,
    precision: tl.constexpr,
):
    """Compute one KV head and one split of a request's context, for all query heads of the group (flash-decoding, Dao 2023).

    partial ``[num_rows, num_heads, num_splits, head_dim]``; logs: base-2 logarithms of the splits' sums of weights.
    """
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    index = tl.program_id(2)
    row = tl.load(rows + index)
    seq_len = tl.load(seq_lens + row)
    begin, length = _split_of(seq_len, window, tile, num_splits, shortest)
    first = begin + split * length
    if first < seq_len:
        member = tl.arange(0, heads)
        dim = tl.arange(0, dims)
        head = kv_head * group + member
        mask = (member < group)[:, None] & (dim < head_dim)[None, :]
        own = query + tl.load(query_starts + row).to(tl.int64) * token_stride
        states = tl.load(own + head[:, None] * head_dim + dim[None, :], mask=mask, other=0.0)
        positions = tl.zeros([heads], dtype=tl.int32) + seq_len - 1
        highest = tl.full([heads], -1.0e30, dtype=tl.float32)
        total = tl.zeros([heads], dtype=tl.float32)
        mixed = tl.zeros([heads, dims], dtype=tl.float32)
        table = tables + row.to(tl.int64) * table_stride
        keys = cache + kv_head * head_stride
        for start in range(first, tl.minimum(first + length, seq_len), tile):
            highest, total, mixed = _fold(
                states, positions, highest, total, mixed, start, seq_len, table, keys, kv_stride, block_stride,
                scale, window, cap, block_size, head_dim, dims, tile, precision,
            )  # fmt: skip
        place = (index.to(tl.int64) * tl.num_programs(0) * group + head) * num_splits + split
        tl.store(logs + place, highest + tl.log2(total), mask=member < group)
        tl.store(partial + place[:, None] * head_dim + dim[None, :], mixed / total[:, None], mask=mask)


@triton.jit(do_not_specialize=_STRIDES, do_not_specialize_on_alignment=_VECTORS)
def combine_kernel(
    output,
    partial,
    logs,
    rows,
    query_starts,
    seq_lens,
    token_stride,
    window: tl.constexpr,
    head_dim: tl.constexpr,
    dims: tl.constexpr,
    tile: tl.constexpr,
    num_splits: tl.constexpr,
    shortest: tl.constexpr,
):
    """Combine the splits of one head of one request: their mean, weighted by their sums."""
    head = tl.program_id(0)
    index = tl.program_id(1)
    row = tl.load(rows + index)
    seq_len = tl.load(seq_lens + row)
    begin, length = _split_of(seq_len, window, tile, num_splits, shortest)
    split = tl.arange(0, num_splits)
    dim = tl.arange(0, dims)
    is_used = begin + split * length < seq_len
    is_dim = dim < head_dim
    place = (index.to(tl.int64) * tl.num_programs(0) + head) * num_splits + split
    log = tl.load(logs + place, mask=is_used, other=-1.0e30)
    weights = tl.where(is_used, tl.exp2(log - tl.max(log, 0)), 0.0)
    parts = tl.load(
        partial + place[:, None] * head_dim + dim[None, :], mask=is_used[:, None] & is_dim[None, :], other=0.0
    )
    mixed = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    token = tl.load(query_starts + row).to(tl.int64)
    target = output + token * token_stride + head * head_dim + dim
    tl.store(target, mixed.to(output.dtype.element_ty), mask=is_dim)
