"""Triton kernels that multiply the rows of a small batch by a matrix, with the norm before the product and what follows it.

Each reads the weights once, at the rate of memory, and computes in float32. ``outputs``, ``inputs`` and ``rows`` are tile
sizes, powers of two. If ``overlaps``, a kernel begins while the one before ends: what it reads before ``gdc_wait`` must
not be written by any kernel. Every kernel that is launched so waits, so all that come before it have ended then.
"""

import triton
import triton.language as tl


@triton.jit
def _silu_and_mul(gate, up, dtype: tl.constexpr):
    """Compute silu(gate) × up of products that are rounded as if they were stored."""
    rounded = gate.to(dtype).to(tl.float32)
    return rounded * tl.sigmoid(rounded) * up.to(dtype).to(tl.float32)


@triton.jit
def _apply_epilogue(
    total,
    up,
    bias,
    row,
    is_row,
    num_outputs,
    has_bias: tl.constexpr,
    is_gated: tl.constexpr,
    dtype: tl.constexpr,
):
    """Add the bias, apply the gate, and round as if the result were stored."""
    if has_bias:
        total += tl.load(bias + row, mask=is_row, other=0.0).to(tl.float32)
    if is_gated:
        if has_bias:
            up += tl.load(bias + num_outputs + row, mask=is_row, other=0.0).to(tl.float32)
        total = _silu_and_mul(total, up, dtype)
    return total.to(dtype).to(tl.float32)


@triton.jit
def _reduce_splits(total, partial, arrived, target, mask, plane, split, splits: tl.constexpr):
    """Store a split's sum; return whether all have arrived, and then their sum in their order."""
    tl.store(partial + split * plane + target, total, mask=mask)
    tl.debug_barrier()  # every thread has stored before one of them counts
    is_last = tl.atomic_add(arrived, 1, sem="acq_rel") == splits - 1
    if is_last:
        total = tl.zeros_like(total)
        for other in range(splits):
            total += tl.load(partial + other * plane + target, mask=mask, other=0.0, cache_modifier=".cg")
        tl.store(arrived, 0)
    return is_last, total


@triton.jit
def row_kernel(
    states, norm, weight, bias, residual, output, eps, num_inputs, num_outputs,
    outputs: tl.constexpr, inputs: tl.constexpr, has_norm: tl.constexpr, has_bias: tl.constexpr, has_residual: tl.constexpr,
    is_gated: tl.constexpr, overlaps: tl.constexpr,
):  # fmt: skip
    """Compute some outputs of one row, of its norm if ``has_norm``; gated, or added to ``residual``.

    weight ``[num_outputs, num_inputs]``; if ``is_gated``, as many rows for up behind those for the gate, as in ``bias``.
    """
    row = tl.program_id(0) * outputs + tl.arange(0, outputs)
    column = tl.arange(0, inputs)
    is_row = row < num_outputs
    place = weight + row.to(tl.int64)[:, None] * num_inputs + column[None, :]
    up_place = place + num_outputs.to(tl.int64) * num_inputs
    mask = is_row[:, None] & (column < num_inputs)[None, :]
    tile = tl.load(place, mask=mask, other=0.0, eviction_policy="evict_first")
    if is_gated:
        up_tile = tl.load(up_place, mask=mask, other=0.0, eviction_policy="evict_first")
    if overlaps:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if has_residual:
        before = tl.load(residual + row, mask=is_row, other=0.0).to(tl.float32)
    total = tl.zeros([outputs, inputs], tl.float32)
    up_total = tl.zeros([outputs, inputs], tl.float32)
    squares = tl.zeros([inputs], tl.float32)
    for start in range(0, num_inputs, inputs):
        is_column = start + column < num_inputs
        own = tl.load(states + start + column, mask=is_column, other=0.0).to(tl.float32)
        if has_norm:
            squares += own * own
            own *= tl.load(norm + start + column, mask=is_column, other=0.0).to(tl.float32)
        ahead = start + inputs  # the next tile is loaded while this one is computed
        mask = is_row[:, None] & (ahead + column < num_inputs)[None, :]
        next_tile = tl.load(place + ahead, mask=mask, other=0.0, eviction_policy="evict_first")
        if is_gated:
            next_up_tile = tl.load(up_place + ahead, mask=mask, other=0.0, eviction_policy="evict_first")
            up_total += up_tile.to(tl.float32) * own[None, :]
            up_tile = next_up_tile
        total += tile.to(tl.float32) * own[None, :]
        tile = next_tile
    found = tl.sum(total, 1)
    up = tl.sum(up_total, 1)
    dtype = output.dtype.element_ty
    if has_norm:
        scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / num_inputs + eps)
        found *= scale
        up *= scale
    found = _apply_epilogue(found, up, bias, row, is_row, num_outputs, has_bias, is_gated, dtype)
    if has_residual:
        found += before
    tl.store(output + row, found.to(dtype), mask=is_row)


@triton.jit(do_not_specialize=["num_rows"])
def rows_kernel(
    states, weight, bias, residual, output, partial, arrived, num_rows, num_inputs, num_outputs, share,
    rows: tl.constexpr, outputs: tl.constexpr, inputs: tl.constexpr, splits: tl.constexpr, stages: tl.constexpr,
    precision: tl.constexpr, has_bias: tl.constexpr, has_residual: tl.constexpr, is_gated: tl.constexpr,
    overlaps: tl.constexpr,
):  # fmt: skip
    """Compute what ``row_kernel`` does for up to ``rows`` rows by matrix units, without the norm; gates have one split.

    A split sums ``share`` inputs into ``partial [splits, num_rows, num_outputs]``; the last program of ``arrived`` adds
    them in their order and leaves zero there.
    """
    part = tl.program_id(0)
    split = tl.program_id(1)
    begin = split * share
    end = tl.minimum(begin + share, num_inputs)
    token = tl.arange(0, rows)
    column = tl.arange(0, inputs)
    row = part * outputs + tl.arange(0, outputs)
    is_row = row < num_outputs
    weight_row = tl.where(is_row, row, 0).to(tl.int64) * num_inputs
    behind = num_outputs.to(tl.int64) * num_inputs
    if overlaps:
        tl.extra.cuda.gdc_wait()
    is_token = token < num_rows
    own_place = states + token[:, None] * num_inputs + column[None, :]
    place = weight + weight_row[None, :] + column[:, None]
    total = tl.zeros([rows, outputs], tl.float32)
    up_total = tl.zeros([rows, outputs], tl.float32)
    for start in tl.range(begin, end, inputs, num_stages=stages):
        is_column = start + column < end
        own = tl.load(own_place + start, mask=is_token[:, None] & is_column[None, :], other=0.0)
        tile = tl.load(place + start, mask=is_column[:, None], other=0.0, eviction_policy="evict_first")
        total = tl.dot(own, tile, total, input_precision=precision)
        if is_gated:
            up_tile = tl.load(
                place + behind + start, mask=is_column[:, None], other=0.0, eviction_policy="evict_first"
            )
            up_total = tl.dot(own, up_tile, up_total, input_precision=precision)
    if overlaps:  # not before: programs of the next kernel beside this one's would crowd some multiprocessors
        tl.extra.cuda.gdc_launch_dependents()
    mask = is_token[:, None] & is_row[None, :]
    target = token[:, None] * num_outputs + row[None, :]
    dtype = output.dtype.element_ty
    is_last = True
    if splits > 1:
        plane = num_rows * num_outputs
        is_last, total = _reduce_splits(total, partial, arrived + part, target, mask, plane, split, splits)
    if is_last:
        total = _apply_epilogue(total, up_total, bias, row, is_row, num_outputs, has_bias, is_gated, dtype)
        if has_residual:
            total += tl.load(residual + target, mask=mask, other=0.0).to(tl.float32)
        tl.store(output + target, total.to(dtype), mask=mask)
