"""Triton kernel that draws a token of each row from its listed tokens, or beside them."""

import triton
import triton.language as tl

from engine.sampling.triton_weights import (
    LEAST,
    LISTED,
    NO_NUMBERS,
    NUM_BEST,
    SEARCHED,
    SUMMED,
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
def _place_of(is_equal, at, num_kept, size):
    """Return the id of the ``num_kept``-th of these tokens in the order of the vocabulary."""
    low = num_kept * 0 - 1
    high = num_kept * 0 + size - 1
    while high - low > 1:
        middle = (low + high) // 2
        if num_of(is_equal & (at <= middle)) >= num_kept:
            high = middle
        else:
            low = middle
    return high


@triton.jit
def _best_of(score, is_there, at, num_best, size):
    """Mark the best scores, the lowest ids among equals."""
    order = order_of(score)
    low = tl.min(tl.where(is_there, order, 2147483648), 0) - 1
    high = tl.max(tl.where(is_there, order, -2147483648), 0)
    while high - low > 1:
        middle = (low + high) // 2
        if num_of(is_there & (order > middle)) < num_best:
            high = middle
        else:
            low = middle
    is_better = is_there & (order > high)
    is_equal = is_there & (order == high)
    last = _place_of(is_equal, at, num_best - num_of(is_better), size)
    return is_better | (is_equal & (at <= last))


@triton.jit
def _without_tail(weight, at, above, bottom, edge, limit, size):
    """Keep the best weights that sum, with those ``above``, to ``limit``; the lowest ids among equals.

    The edge is above ``bottom`` and at most ``edge``. Return the kept weights, their sum with those above, the edge, and the
    last id of those at the edge that are kept.
    """
    while edge - bottom > 1:
        middle = (bottom + edge) // 2
        if (above + tl.sum(tl.where(weight > middle, weight, 0), 0)).to(tl.float64) < limit:
            edge = middle
        else:
            bottom = middle
    is_equal = weight == edge
    num_equal = num_of(is_equal)
    better = above + tl.sum(tl.where(weight > edge, weight, 0), 0)
    num_kept = num_kept_at(better, edge, num_equal, limit)
    last = num_equal * 0 + size
    if num_kept < num_equal:
        last = _place_of(is_equal, at, num_kept.to(tl.int32), size)
    kept = tl.where((weight > edge) | (is_equal & (at <= last)), weight, 0)
    return kept, better + num_kept * edge, edge, last


@triton.jit
def _apply_top_k_top_p(
    word, num_listed, mode, total, above, low, high, settings, num_rows, index, top, size, scale: tl.constexpr
):  # fmt: skip
    """Apply top-k and top-p to the listed tokens.

    Return the mode, the kept weights and their ids, the sum of all that are kept, the edge and its last id; see
    ``_without_tail``.
    """
    at = (word & 0xFFFFFFFF).to(tl.int32)
    is_there = tl.arange(0, word.shape[0]) < num_listed
    score = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    temperature = temperature_of(settings, num_rows, index)
    least = tl.load(settings + LEAST * num_rows + index)
    weight = tl.where(is_there, weights_of(score, top, temperature, least, scale), 0)
    if mode == LISTED:
        num_best = tl.load(settings + NUM_BEST * num_rows + index).to(tl.int32)
        if (num_best > 0) & (num_best < num_listed):
            weight = tl.where(_best_of(score, is_there, at, num_best, size), weight, 0)
        total = tl.sum(weight, 0)
        low = total * 0 - 1
        high = total * 0 + scale
    # What is above the range is in ``above`` already.
    weight = tl.where((weight > low) & (weight <= high), weight, 0)
    edge = total * 0
    last = num_listed * 0 + size
    share = share_of(settings, num_rows, index)
    if share < 1.0:
        limit = share * total.to(tl.float64)
        is_in = ((above + tl.sum(weight, 0)).to(tl.float64) >= limit) | (low < 0)
        if is_in & ((above.to(tl.float64) < limit) | (high >= scale)):
            weight, total, edge, last = _without_tail(
                weight, at, above, low, tl.minimum(high, scale), limit, size
            )
        else:
            mode = SEARCHED * 1
    return mode, weight, at, total, edge, last


@triton.jit
def _found_in_list(weight, at, goal, size):
    """Return the first token, in the order of the vocabulary, up to which the listed weights sum to more than ``goal``."""
    first = tl.full([], 0, tl.int32)
    beyond = first + size
    while beyond - first > 1:
        middle = (first + beyond) // 2
        if tl.sum(tl.where(at < middle, weight, 0), 0) > goal:
            beyond = middle
        else:
            first = middle
    return first


@triton.jit
def _part_of(weight, at, above_parts, goal, num_parts, length: tl.constexpr):
    """Return the part of the row with that token, and the sum of the kept weights before it."""
    part = tl.arange(0, above_parts.shape[0])
    first = tl.full([], 0, tl.int32)
    beyond = first + num_parts
    before = goal * 0
    while beyond - first > 1:
        middle = (first + beyond) // 2
        found = tl.sum(tl.where(part < middle, above_parts, 0), 0)
        found += tl.sum(tl.where(at < middle * length, weight, 0), 0)
        if found > goal:
            beyond = middle
        else:
            first = middle
            before = found
    return first, before


@triton.jit
def _found_in_part(
    own,
    start,
    before,
    goal,
    edge,
    last,
    top,
    temperature,
    least,
    size,
    scale: tl.constexpr,
    length: tl.constexpr,
    tile: tl.constexpr,
):
    """Return that token, which is in the part from ``start`` on; the kept weights before it sum to ``before``."""
    token = size - 1 + start * 0
    end = tl.minimum(start + length, size)
    while start < end:
        at = start + tl.arange(0, tile)
        score = tl.load(own + at, mask=at < size, other=float("-inf")).to(tl.float32)
        weight = weights_of(score, top, temperature, least, scale)
        kept = tl.where((weight > edge) | ((weight == edge) & (at <= last)), weight, 0)
        sums = tl.cumsum(kept, 0) + before
        found = tl.min(tl.where(sums > goal, at, size), 0)
        before = tl.max(sums, 0)
        start += tile
        if found < size:
            token = found
            start = end
    return token


@triton.jit
def _sums_of_parts(part_sums, index, num_parts, is_summed, has_bounds: tl.constexpr, parts: tl.constexpr):
    """Return the sum of a row's weights, and of those above the range the sum in each part; all are, without bounds."""
    part = tl.arange(0, parts)
    pairs = part_sums + (index * num_parts + part) * 2
    mask = (part < num_parts) & is_summed
    total = tl.sum(tl.load(pairs, mask=mask, other=0), 0)
    return total, tl.load(pairs + (1 if has_bounds else 0), mask=mask, other=0)


@triton.jit
def _border(plans, index, which: tl.constexpr):
    """Return the greatest weight that is not above a border of the range."""
    return (tl.load(plans + index * 5 + which).to(tl.int64) << 10) + 1023


@triton.jit(do_not_specialize=VARYING)
def choose_kernel(
    scores, settings, plans, modes, part_sums, listed, tokens, row_stride, size, num_parts, num_rows,
    scale: tl.constexpr, has_bounds: tl.constexpr, room: tl.constexpr, parts: tl.constexpr, length: tl.constexpr,
    tile: tl.constexpr,
):  # fmt: skip
    """Draw a token of a row. A row whose listed tokens do not suffice is left to ``search_kernel``."""
    index = tl.program_id(0)
    mode = tl.load(modes + index * 2)
    num_listed = tl.load(modes + index * 2 + 1)
    token = tl.full([], 0, tl.int32)
    if (mode <= SUMMED) & (num_listed > room):
        mode = SEARCHED * 1
    if mode <= SUMMED:
        top = tl.load(plans + index * 5)
        total, above_parts = _sums_of_parts(part_sums, index, num_parts, mode == SUMMED, has_bounds, parts)
        above = tl.sum(above_parts, 0)
        edge = total * 0
        last = num_listed * 0 + size
        at = tl.arange(0, room if has_bounds else 16)
        weight = tl.load(listed + index * room + at, mask=at < num_listed, other=0)
        if has_bounds:
            low = _border(plans, index, 1)
            high = _border(plans, index, 2)
            mode, weight, at, total, edge, last = _apply_top_k_top_p(
                weight, num_listed, mode, total, above, low, high, settings, num_rows, index, top, size, scale
            )
        goal = scaled(uniform_of(settings, num_rows, index), total)
        if above == 0:
            token = _found_in_list(weight, at, goal, size)
        else:
            first, before = _part_of(weight, at, above_parts, goal, num_parts, length)
            own = scores + tl.load(settings + index) * row_stride
            temperature = temperature_of(settings, num_rows, index)
            least = tl.load(settings + LEAST * num_rows + index)
            token = _found_in_part(
                own, first * length, before, goal, edge, last, top, temperature, least, size, scale, length, tile
            )  # fmt: skip
    tl.store(modes + index * 2, mode)
    tl.store(tokens + index, token.to(tl.int64))
    tl.store(tokens + num_rows + index, (mode != NO_NUMBERS).to(tl.int64))
