"""Triton kernel that draws the tokens of rows whose listed tokens do not suffice, by reading all of them many times."""

import triton
import triton.language as tl

from engine.sampling.triton_weights import (
    LEAST,
    NUM_BEST,
    SEARCHED,
    VARYING,
    num_kept_at,
    num_of,
    order_of,
    scaled,
    share_of,
    temperature_of,
    uniform_of,
    weights_of,
)


@triton.jit
def _best_weights(own, at, size, top, temperature, least, border, last_best, scale: tl.constexpr):
    """Return weights of these tokens, int64; 0 for those that top-k does not keep."""
    score = tl.load(own + at, mask=at < size, other=float("-inf")).to(tl.float32)
    order = order_of(score)
    is_best = (order > border) | ((order == border) & (at <= last_best))
    return tl.where(is_best, weights_of(score, top, temperature, least, scale), 0)


@triton.jit
def _order_of_best(own, size, num_best, tile: tl.constexpr):
    """Return the order of the ``num_best``-th best score of a row, and the last id of those equal to it that are kept."""
    at = tl.arange(0, tile)
    low = tl.full([], -2147483649, tl.int64)
    high = tl.full([], 2147483647, tl.int64)
    while high - low > 1:
        middle = (low + high) // 2
        found = tl.zeros([tile], tl.int32)
        for start in range(0, size, tile):
            score = tl.load(own + start + at, mask=start + at < size, other=float("-inf")).to(tl.float32)
            found += ((order_of(score) > middle) & (start + at < size)).to(tl.int32)
        if tl.sum(found, 0) < num_best:
            high = middle
        else:
            low = middle
    better = tl.zeros([tile], tl.int32)
    for start in range(0, size, tile):
        score = tl.load(own + start + at, mask=start + at < size, other=float("-inf")).to(tl.float32)
        better += (order_of(score) > high).to(tl.int32)
    num_missing = num_best - tl.sum(better, 0)
    num_seen = num_missing * 0
    last = tl.full([], -1, tl.int32)
    for start in range(0, size, tile):
        score = tl.load(own + start + at, mask=start + at < size, other=float("-inf")).to(tl.float32)
        is_equal = (order_of(score) == high) & (start + at < size)
        place = tl.cumsum(is_equal.to(tl.int32), 0) + num_seen
        last = tl.maximum(last, tl.max(tl.where(is_equal & (place <= num_missing), start + at, -1), 0))
        num_seen += num_of(is_equal)
    return high, last


@triton.jit
def _edge_of(
    own, size, top, temperature, least, border, last_best, limit, scale: tl.constexpr, tile: tl.constexpr
):
    """Return the least weight above which the row's weights sum to less than ``limit``."""
    at = tl.arange(0, tile)
    low = tl.full([], -1, tl.int64)
    high = tl.full([], scale, tl.int64)
    while high - low > 1:
        middle = (low + high) // 2
        above = tl.zeros([tile], tl.int64)
        for start in range(0, size, tile):
            weight = _best_weights(own, start + at, size, top, temperature, least, border, last_best, scale)
            above += tl.where(weight > middle, weight, 0)
        if tl.sum(above, 0).to(tl.float64) < limit:
            high = middle
        else:
            low = middle
    return high


@triton.jit
def _sums_at(
    own, size, top, temperature, least, border, last_best, edge, scale: tl.constexpr, tile: tl.constexpr
):
    """Return the sum of the row's weights above ``edge``, and how many are equal to it."""
    at = tl.arange(0, tile)
    sums = tl.zeros([tile], tl.int64)
    equals = tl.zeros([tile], tl.int32)
    for start in range(0, size, tile):
        weight = _best_weights(own, start + at, size, top, temperature, least, border, last_best, scale)
        sums += tl.where(weight > edge, weight, 0)
        equals += ((weight == edge) & (start + at < size)).to(tl.int32)
    return tl.sum(sums, 0), tl.sum(equals, 0)


@triton.jit(do_not_specialize=VARYING)
def search_kernel(
    scores,
    settings,
    plans,
    modes,
    tokens,
    row_stride,
    size,
    num_rows,
    scale: tl.constexpr,
    tile: tl.constexpr,
):
    """Draw the token of a row that the other kernels left, by reading the row about fifty times."""
    index = tl.program_id(0)
    if tl.load(modes + index * 2) == SEARCHED:
        temperature = temperature_of(settings, num_rows, index)
        share = share_of(settings, num_rows, index)
        least = tl.load(settings + LEAST * num_rows + index)
        num_best = tl.load(settings + NUM_BEST * num_rows + index).to(tl.int32)
        top = tl.load(plans + index * 5)
        own = scores + tl.load(settings + index) * row_stride
        border = tl.full([], -2147483649, tl.int64)
        last_best = tl.full([], -1, tl.int32)
        if (num_best > 0) & (num_best < size):
            border, last_best = _order_of_best(own, size, num_best, tile)
        total, _ = _sums_at(own, size, top, temperature, least, border, last_best, last_best * 0, scale, tile)
        edge = total * 0
        num_kept = total * 0
        if share < 1.0:
            limit = share * total.to(tl.float64)
            edge = _edge_of(own, size, top, temperature, least, border, last_best, limit, scale, tile)
            above, num_equal = _sums_at(
                own, size, top, temperature, least, border, last_best, edge, scale, tile
            )
            num_kept = num_kept_at(above, edge, num_equal, limit)
            total = above + num_kept * edge
        goal = scaled(uniform_of(settings, num_rows, index), total)
        at = tl.arange(0, tile)
        token = size - 1 + num_best * 0
        before = total * 0
        num_seen = total * 0
        start = 0
        while start < size:
            weight = _best_weights(own, start + at, size, top, temperature, least, border, last_best, scale)
            is_equal = (weight == edge) & (start + at < size)
            place = tl.cumsum(is_equal.to(tl.int64), 0) + num_seen
            kept = tl.where((weight > edge) | (is_equal & (place <= num_kept)), weight, 0)
            found = tl.min(tl.where(tl.cumsum(kept, 0) + before > goal, start + at, size), 0)
            before += tl.sum(kept, 0)
            num_seen += tl.sum(is_equal.to(tl.int64), 0)
            start += tile
            if found < size:
                token = found
                start = size
        tl.store(tokens + index, token.to(tl.int64))
