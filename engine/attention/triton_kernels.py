"""Triton kernels over the paged KV cache: store and prefill.

Imported only if Triton is installed. Sizes that are powers of two are padded heads, head dims and tiles; ``head_dim`` and
``group`` are the real sizes. Scores are in base 2: ``scale`` includes log2(e). The result of a row does not depend on other
rows.
"""

import triton
import triton.language as tl

VECTORS = [
    "slots", "num_cleared", "tiles", "items", "num_items", "units", "query_starts", "seq_lens", "tables", "table_starts",
]  # fmt: skip
"""Their places differ from step to step: a kernel must not be compiled anew for those that are aligned, and those that are
not."""


@triton.jit(do_not_specialize_on_alignment=VECTORS)
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
    num_kv_heads: tl.constexpr,
    heads: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    dims: tl.constexpr,
):
    """Write key and value of one token, all heads together, then zero ``num_cleared`` slots. A slot below 0 is skipped.

    key_stride, value_stride: elements from one token's heads to the next token's. heads: ``num_kv_heads``, padded.
    """
    token = tl.program_id(0)
    slot = tl.load(slots + token)
    if slot >= 0:
        block = (slot // block_size).to(tl.int64)
        head = tl.arange(0, heads)
        dim = tl.arange(0, dims)
        mask = (head < num_kv_heads)[:, None] & (dim < head_dim)[None, :]
        source = head[:, None] * head_dim + dim[None, :]
        from_key = key + token.to(tl.int64) * key_stride + source
        from_value = value + token.to(tl.int64) * value_stride + source
        within = head[:, None] * head_stride + (slot % block_size) * head_dim + dim[None, :]
        place = cache + block * block_stride + within
        tl.store(place, tl.load(from_key, mask=mask), mask=mask)
        tl.store(place + kv_stride, tl.load(from_value, mask=mask), mask=mask)
        zeros = tl.zeros([heads, dims], dtype=cache.dtype.element_ty)
        for behind in range(1, tl.load(num_cleared + token) + 1):
            tl.store(place + behind * head_dim, zeros, mask=mask)
            tl.store(place + kv_stride + behind * head_dim, zeros, mask=mask)


@triton.jit
def fold(
    query,
    query_positions,
    highest,
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
    is_decode: tl.constexpr,
):
    """Add the KV of ``tile`` positions from ``start`` to the running softmax (Milakov and Gimelshein 2018).

    Return the highest scores, the decay of earlier sums, the weights, and the mixed values. Behind the end of the sequence
    its last token is read, with weight 0: so loads have no mask. is_decode: the queries are those of the last token.
    """
    positions = start + tl.arange(0, tile)
    there = tl.minimum(positions, seq_len - 1)
    dim = tl.arange(0, dims)
    blocks = tl.load(table + there // block_size).to(tl.int64)
    places = keys + blocks * block_stride + (there % block_size) * head_dim
    if head_dim == dims:
        key = tl.load(places[None, :] + dim[:, None])
    else:
        key = tl.load(places[None, :] + dim[:, None], mask=(dim < head_dim)[:, None], other=0.0)
    scores = tl.dot(query, key, input_precision=precision) * scale
    if cap > 0.0:
        scores = cap * (2.0 * tl.sigmoid(2.0 * scores / cap) - 1.0)  # cap × tanh(scores / cap)
    is_seen = (positions < seq_len)[None, :]
    if not is_decode:
        is_seen = is_seen & (positions[None, :] <= query_positions[:, None])
    if window > 0:
        is_seen = is_seen & (positions[None, :] > query_positions[:, None] - window)
    scores = tl.where(is_seen, scores, -1.0e30)
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.where(is_seen, tl.exp2(scores - new_highest[:, None]), 0.0)
    decay = tl.exp2(highest - new_highest)
    if head_dim == dims:
        value = tl.load(places[:, None] + kv_stride + dim[None, :])
    else:
        value = tl.load(places[:, None] + kv_stride + dim[None, :], mask=(dim < head_dim)[None, :], other=0.0)
    mixed = mixed * decay[:, None] + tl.dot(weights.to(value.dtype), value, input_precision=precision)
    return new_highest, decay, weights, mixed


@triton.jit(do_not_specialize_on_alignment=VECTORS)
def prefill_kernel(
    query,
    output,
    cache,
    tiles,
    query_starts,
    seq_lens,
    tables,
    table_starts,
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
    table = tables + tl.load(table_starts + row)
    keys = cache + (head // group) * head_stride
    for start in range(begin, end, tile):
        highest, decay, weights, mixed = fold(
            states, positions, highest, mixed, start, seq_len, table, keys, kv_stride, block_stride,
            scale, window, cap, block_size, head_dim, dims, tile, precision, False,
        )  # fmt: skip
        total = total * decay + tl.sum(weights, 1)
    total = tl.where(own < count, total, 1.0)
    tl.store(output + places, (mixed / total[:, None]).to(output.dtype.element_ty), mask=mask)
