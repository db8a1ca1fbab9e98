"""The Triton kernels for splits of long contexts, and their combination: decodes, and chunks behind a long context.

Names of sizes as in ``engine.attention.triton_kernels``. The result of a row does not depend on other rows.
"""

import triton
import triton.language as tl

from engine.attention.triton_kernels import VECTORS, fold


@triton.jit(do_not_specialize_on_alignment=VECTORS)
def split_kernel(
    query, output, partial, logs, cache, items, num_items, query_starts, seq_lens, tables, table_starts,
    token_stride, block_stride, kv_stride, head_stride, scale,
    group: tl.constexpr, num_kv_heads: tl.constexpr, rows: tl.constexpr, kept: tl.constexpr,
    window: tl.constexpr, cap: tl.constexpr, block_size: tl.constexpr, head_dim: tl.constexpr,
    dims: tl.constexpr, tile: tl.constexpr, precision: tl.constexpr, is_decode: tl.constexpr,
    is_joined: tl.constexpr, overlaps: tl.constexpr,
):  # fmt: skip
    """Compute items of the work list, one KV head at a time, by as many programs as run at once (flash-decoding, Dao 2023).

    items: see ``engine.attention.splits``; joined ones if ``is_joined``. rows: ``kept``, padded. logs: base-2 logarithms of
    sums of weights. A unit with one split has no partial results ``[num_splits, num_kv_heads, kept, head_dim]``.
    """
    if overlaps:
        tl.extra.cuda.gdc_launch_dependents()
    dim = tl.arange(0, dims)
    num_works = tl.load(num_items) * num_kv_heads
    for work in range(tl.program_id(0), num_works, tl.num_programs(0)):
        kv_head = work % num_kv_heads
        item = items + (work // num_kv_heads) * (7 if is_joined else 5)
        row, seq_len, positions, own, is_row = _rows_of(
            item, query_starts, seq_lens, token_stride, kv_head, group, rows, kept, head_dim
        )
        begin = tl.load(item + 2)
        end = tl.minimum(tl.load(item + 3), seq_len)
        num_splits = tl.load(item + 4)
        table = tables + tl.load(table_starts + row)
        mask = is_row[:, None] & (dim < head_dim)[None, :]
        places = own[:, None] + dim[None, :]
        if overlaps:  # until here it has read only what the host copied
            tl.extra.cuda.gdc_wait()
        states = tl.load(query + places, mask=mask, other=0.0)
        highest, total, mixed = _nothing_seen(rows, tile, dims, is_decode)
        keys = cache + kv_head * head_stride
        result = work * kept
        if is_joined:
            result = (tl.load(item + 6) * num_kv_heads + kv_head) * kept
            length = tl.load(item + 5)
            border = begin + length
        for start in range(begin, end, tile):
            if is_joined:  # noqa: SIM102 - a constant of the kernel
                if start == border:  # of two splits: the loop goes on, and with it the loads ahead
                    _store_result(partial, logs, result, highest, total, mixed, is_row, head_dim, is_decode)
                    highest, total, mixed = _nothing_seen(rows, tile, dims, is_decode)
                    border += length
                    result += num_kv_heads * kept
            highest, decay, weights, mixed = fold(
                states, positions, highest, mixed, start, seq_len, table, keys, kv_stride, block_stride,
                scale, window, cap, block_size, head_dim, dims, tile, precision, is_decode,
            )  # fmt: skip
            total = total * decay[:, None] + weights if is_decode else total * decay + tl.sum(weights, 1)
        if num_splits == 1:
            mean = _mean_of(total, mixed, is_decode)
            tl.store(output + places, mean.to(output.dtype.element_ty), mask=mask)
        else:
            _store_result(partial, logs, result, highest, total, mixed, is_row, head_dim, is_decode)
        tl.debug_barrier()  # the next item's KV is copied into shared memory that some warps may still read
    if overlaps:
        tl.extra.cuda.gdc_wait()


@triton.jit
def _rows_of(
    item, query_starts, seq_lens, token_stride, kv_head, group: tl.constexpr, rows: tl.constexpr,
    kept: tl.constexpr, head_dim: tl.constexpr,
):  # fmt: skip
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
def _nothing_seen(rows: tl.constexpr, tile: tl.constexpr, dims: tl.constexpr, is_decode: tl.constexpr):
    """Return the state of a split before its first tile: highest scores, sums of weights, mixed values.

    The sums of a decode are of each place of a tile, and are added up behind the last one.
    """
    highest = tl.full([rows], -1.0e30, dtype=tl.float32)
    total = tl.zeros([rows, tile] if is_decode else [rows], dtype=tl.float32)
    return highest, total, tl.zeros([rows, dims], dtype=tl.float32)


@triton.jit
def _sum_of(total, is_decode: tl.constexpr):
    """Return the sum of weights of each row."""
    return tl.sum(total, 1) if is_decode else total


@triton.jit
def _mean_of(total, mixed, is_decode: tl.constexpr):
    """Return the mean of each row; a row that sees nothing of a split has zeros."""
    sums = _sum_of(total, is_decode)
    return mixed / tl.where(sums > 0.0, sums, 1.0)[:, None]


@triton.jit
def _store_result(
    partial, logs, result, highest, total, mixed, is_row, head_dim: tl.constexpr, is_decode: tl.constexpr
):  # fmt: skip
    """Store the mean of one split and the logarithm of its sum, which is low where a row sees nothing of it."""
    rows: tl.constexpr = mixed.shape[0]
    dims: tl.constexpr = mixed.shape[1]
    dim = tl.arange(0, dims)
    place = (result + tl.arange(0, rows)).to(tl.int64)
    sums = _sum_of(total, is_decode)
    log = tl.where(sums > 0.0, highest + tl.log2(tl.where(sums > 0.0, sums, 1.0)), -1.0e30)
    tl.store(logs + place, log, mask=is_row)
    mask = is_row[:, None] & (dim < head_dim)[None, :]
    tl.store(partial + place[:, None] * head_dim + dim[None, :], _mean_of(total, mixed, is_decode), mask=mask)


@triton.jit(do_not_specialize_on_alignment=VECTORS)
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
    few: tl.constexpr,
    many: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Combine the splits of one packed row of a unit: their mean, weighted by their sums.

    A unit with up to ``few`` splits reads them at once, one with more ``many`` at a time.
    """
    if overlaps:
        tl.extra.cuda.gdc_launch_dependents()
    kv_head = tl.program_id(0) // kept
    member = tl.program_id(0) % kept
    unit = units + tl.program_id(1) * 4
    row = tl.load(unit)
    packed = tl.load(unit + 1) + member
    first = tl.load(unit + 2)
    num_splits = tl.load(unit + 3)
    query_start = tl.load(query_starts + row)
    token = packed // group
    is_there = token < tl.load(query_starts + row + 1) - query_start
    if overlaps:  # until here it has read only what the host copied
        tl.extra.cuda.gdc_wait()
    if (num_splits > 1) & is_there:
        dim = tl.arange(0, dims)
        base = (first.to(tl.int64) * num_kv_heads + kv_head) * kept + member
        if num_splits <= few:
            mean = _combined(partial, logs, base, num_splits, num_kv_heads * kept, head_dim, dims, few)
        else:
            mean = _combined(partial, logs, base, num_splits, num_kv_heads * kept, head_dim, dims, many)
        own = (query_start + token).to(tl.int64) * token_stride + (
            kv_head * group + packed % group
        ) * head_dim
        tl.store(output + own + dim, mean.to(output.dtype.element_ty), mask=dim < head_dim)


@triton.jit
def _combined(
    partial, logs, base, num_splits, stride, head_dim: tl.constexpr, dims: tl.constexpr, at_once: tl.constexpr
):
    """Return the weighted mean of results that are ``stride`` rows apart, the first one in row ``base``."""
    dim = tl.arange(0, dims)
    highest = tl.max(tl.full([at_once], -1.0e30, dtype=tl.float32), 0)
    total = highest * 0.0
    mixed = tl.zeros([dims], dtype=tl.float32)
    for start in range(0, num_splits, at_once):
        split = start + tl.arange(0, at_once)
        is_used = split < num_splits
        place = base + split * stride
        mask = is_used[:, None] & (dim < head_dim)[None, :]
        parts = tl.load(partial + place[:, None] * head_dim + dim[None, :], mask=mask, other=0.0)
        log = tl.load(logs + place, mask=is_used, other=-1.0e30)
        new_highest = tl.maximum(highest, tl.max(log, 0))
        weights = tl.where(is_used, tl.exp2(log - new_highest), 0.0)
        decay = tl.exp2(highest - new_highest)
        mixed = mixed * decay + tl.sum(parts * weights[:, None], 0)
        total = total * decay + tl.sum(weights, 0)
        highest = new_highest
    return mixed / total
