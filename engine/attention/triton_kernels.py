"""Triton kernels over the paged KV cache: store, prefill, splits of long contexts, and their combination.

Imported only if Triton is installed. Sizes that are powers of two are padded heads, head dims and tiles; ``head_dim`` and
``group`` are the real sizes. Scores are in base 2: ``scale`` includes log2(e). The result of a row does not depend on other
rows.
"""

import triton
import triton.language as tl

_VECTORS = [
    "slots", "num_cleared", "tiles", "items", "num_items", "units", "query_starts", "seq_lens", "tables", "table_starts",
]  # fmt: skip
"""Their places differ from step to step: a kernel must not be compiled anew for those that are aligned, and those that are
not."""


@triton.jit(do_not_specialize_on_alignment=_VECTORS)
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


@triton.jit(do_not_specialize_on_alignment=_VECTORS)
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
        highest, total, mixed = _fold(
            states, positions, highest, total, mixed, start, seq_len, table, keys, kv_stride, block_stride,
            scale, window, cap, block_size, head_dim, dims, tile, precision,
        )  # fmt: skip
    total = tl.where(own < count, total, 1.0)
    tl.store(output + places, (mixed / total[:, None]).to(output.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=_VECTORS)
def split_kernel(
    query,
    output,
    partial,
    logs,
    cache,
    items,
    num_items,
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
    num_kv_heads: tl.constexpr,
    rows: tl.constexpr,
    kept: tl.constexpr,
    window: tl.constexpr,
    cap: tl.constexpr,
    block_size: tl.constexpr,
    head_dim: tl.constexpr,
    dims: tl.constexpr,
    tile: tl.constexpr,
    precision: tl.constexpr,
):
    """Compute items of the work list, one KV head at a time, by as many programs as run at once (flash-decoding, Dao 2023).

    items: see ``engine.attention.splits``. rows: ``kept``, padded. partial ``[num_items, num_kv_heads, kept, head_dim]``;
    logs: base-2 logarithms of sums of weights. A unit with one split needs no partial results.
    """
    dim = tl.arange(0, dims)
    for work in range(tl.program_id(0), tl.load(num_items) * num_kv_heads, tl.num_programs(0)):
        kv_head = work % num_kv_heads
        item = items + (work // num_kv_heads) * 5
        row, seq_len, positions, own, is_row = _rows_of(
            item, query_starts, seq_lens, token_stride, kv_head, group, rows, kept, head_dim
        )
        mask = is_row[:, None] & (dim < head_dim)[None, :]
        states = tl.load(query + own[:, None] + dim[None, :], mask=mask, other=0.0)
        highest = tl.full([rows], -1.0e30, dtype=tl.float32)
        total = tl.zeros([rows], dtype=tl.float32)
        mixed = tl.zeros([rows, dims], dtype=tl.float32)
        table = tables + tl.load(table_starts + row)
        keys = cache + kv_head * head_stride
        for start in range(tl.load(item + 2), tl.minimum(tl.load(item + 3), seq_len), tile):
            highest, total, mixed = _fold(
                states, positions, highest, total, mixed, start, seq_len, table, keys, kv_stride, block_stride,
                scale, window, cap, block_size, head_dim, dims, tile, precision,
            )  # fmt: skip
        mixed = mixed / tl.where(total > 0.0, total, 1.0)[:, None]
        if tl.load(item + 4) == 1:
            tl.store(output + own[:, None] + dim[None, :], mixed.to(output.dtype.element_ty), mask=mask)
        else:
            place = (work * kept + tl.arange(0, rows)).to(tl.int64)
            tl.store(logs + place, _log_of(highest, total), mask=is_row)
            tl.store(partial + place[:, None] * head_dim + dim[None, :], mixed, mask=mask)


@triton.jit
def _rows_of(
    item,
    query_starts,
    seq_lens,
    token_stride,
    kv_head,
    group: tl.constexpr,
    rows: tl.constexpr,
    kept: tl.constexpr,
    head_dim: tl.constexpr,
):
    """Return an item's request and its length, and of each packed row: position, place of the query, whether it exists."""
    row = tl.load(item)
    member = tl.arange(0, rows)
    packed = tl.load(item + 1) + member
    seq_len = tl.load(seq_lens + row)
    query_start = tl.load(query_starts + row)
    count = tl.load(query_starts + row + 1) - query_start
    token = packed // group
    own = (query_start + token).to(tl.int64) * token_stride + (kv_head * group + packed % group) * head_dim
    return row, seq_len, seq_len - count + token, own, (member < kept) & (token < count)


@triton.jit
def _log_of(highest, total):
    """Return the base-2 logarithm of each row's sum; a row sees nothing of a split that begins behind it."""
    return tl.where(total > 0.0, highest + tl.log2(tl.where(total > 0.0, total, 1.0)), -1.0e30)


@triton.jit(do_not_specialize_on_alignment=_VECTORS)
def combine_kernel(
    output,
    partial,
    logs,
    units,
    query_starts,
    token_stride,
    group: tl.constexpr,
    num_kv_heads: tl.constexpr,
    kept: tl.constexpr,
    head_dim: tl.constexpr,
    dims: tl.constexpr,
    at_once: tl.constexpr,
):
    """Combine the splits of one packed row of a unit, ``at_once`` at a time: their mean, weighted by their sums."""
    kv_head = tl.program_id(0) // kept
    member = tl.program_id(0) % kept
    unit = units + tl.program_id(1) * 4
    row = tl.load(unit)
    packed = tl.load(unit + 1) + member
    first = tl.load(unit + 2)
    num_splits = tl.load(unit + 3)
    query_start = tl.load(query_starts + row)
    token = packed // group
    if (num_splits > 1) & (token < tl.load(query_starts + row + 1) - query_start):
        dim = tl.arange(0, dims)
        is_dim = dim < head_dim
        highest = tl.max(tl.full([at_once], -1.0e30, dtype=tl.float32), 0)
        total = highest * 0.0
        mixed = tl.zeros([dims], dtype=tl.float32)
        for start in range(0, num_splits, at_once):
            split = start + tl.arange(0, at_once)
            is_used = split < num_splits
            place = ((first + split).to(tl.int64) * num_kv_heads + kv_head) * kept + member
            log = tl.load(logs + place, mask=is_used, other=-1.0e30)
            new_highest = tl.maximum(highest, tl.max(log, 0))
            weights = tl.where(is_used, tl.exp2(log - new_highest), 0.0)
            decay = tl.exp2(highest - new_highest)
            parts = tl.load(
                partial + place[:, None] * head_dim + dim[None, :],
                mask=is_used[:, None] & is_dim[None, :],
                other=0.0,
            )
            mixed = mixed * decay + tl.sum(parts * weights[:, None], 0)
            total = total * decay + tl.sum(weights, 0)
            highest = new_highest
        own = (query_start + token).to(tl.int64) * token_stride + (
            kv_head * group + packed % group
        ) * head_dim
        tl.store(output + own + dim, (mixed / total).to(output.dtype.element_ty), mask=is_dim)
