"""Triton kernels that find out which tokens of each row may be drawn; ``triton_choosing`` draws one of them.

Several programs read a row. Weights are whole numbers (see ``engine.sampling.sampler``), so sums are exact over any parts
and in any order. Estimates in float32 decide only which tokens are looked at more closely, and exact sums show whether they
were right.
"""

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
    scores_at,
    share_of,
    temperature_of,
    weights_of,
)

SMALL_ROUNDER = tl.constexpr(12582912.0)
SMALL_ROUNDER_BITS = tl.constexpr(0x4B400000)


@triton.jit
def _per_bin(temperature, fineness: tl.constexpr):
    return tl.minimum(fineness / temperature, 1e30).to(tl.float32)


@triton.jit
def _bin_of(score, temperature, fineness: tl.constexpr):
    """Return the bin of a score; it depends on nothing else than the temperature, so the bins of all parts fit together."""
    return tl.floor(score * _per_bin(temperature, fineness))


@triton.jit(do_not_specialize=VARYING)
def survey_kernel(
    scores,
    settings,
    highest,
    sums,
    counts,
    row_stride,
    size,
    num_rows,
    has_bounds: tl.constexpr,
    fineness: tl.constexpr,
    bins: tl.constexpr,
    tile: tl.constexpr,
):
    """Write the highest score of a part of a row, about the sum of its shares (NaN if one is), and how many are in each bin.

    Bins are counted downwards from the highest score. From one to the next, weights decline by exp(1 / fineness). The last
    one has no end.
    """
    part = tl.program_id(0)
    index = tl.program_id(1)
    at = part * tile + tl.arange(0, tile)
    score = scores_at(scores, settings, index, row_stride, at, size)
    top = tl.max(score, 0)
    place = index * tl.num_programs(0) + part
    tl.store(highest + place, top)
    temperature = temperature_of(settings, num_rows, index)
    to_power = tl.minimum(1.4426950408889634 / temperature, 1e30).to(tl.float32)
    highest_power = tl.where(top == float("-inf"), 0.0, top) * to_power
    tl.store(sums + place, tl.sum(tl.exp2(score * to_power - highest_power), 0))
    if has_bounds:
        upper = _bin_of(top, temperature, fineness) + 0.5
        below = (upper - score * _per_bin(temperature, fineness)) + SMALL_ROUNDER
        bin = below.to(tl.int32, bitcast=True) - SMALL_ROUNDER_BITS
        found = tl.histogram(tl.minimum(tl.maximum(bin, 0), bins - 1), bins)
        tl.store(counts + place.to(tl.int64) * bins + tl.arange(0, bins), found)


@triton.jit
def _merged(counts, highest, first, temperature, num_parts, fineness: tl.constexpr, bins: tl.constexpr):
    """Return how many scores of a row are in each bin below its highest score, 0 for the last bin."""
    near = tl.arange(0, 16)
    bin = tl.arange(0, bins)
    found = tl.zeros([bins], tl.int32)
    for start in range(0, num_parts, 16):
        is_part = start + near < num_parts
        top = tl.load(highest + start + near, mask=is_part, other=float("-inf"))
        shift = first - _bin_of(top, temperature, fineness)
        shift = tl.where((shift >= 0) & (shift < bins), shift, bins * 1.0).to(tl.int32)
        source = bin[None, :] - shift[:, None]
        is_there = is_part[:, None] & (source >= 0) & (source < bins - 1)
        found += tl.sum(tl.load(counts + (start + near)[:, None] * bins + source, mask=is_there, other=0), 0)
    return tl.where(bin < bins - 1, found, 0)


@triton.jit
def _last_bin(
    num_above, top, first, temperature, least, num_best, size, scale: tl.constexpr, fineness: tl.constexpr
):
    """Return the last bin with tokens that top-k and min-p leave, and the last one by min-p alone; ``bins`` if unknown."""
    bins: tl.constexpr = num_above.shape[0]
    lowest = tl.log((tl.maximum(least, 1).to(tl.float64) - 0.5) / scale) * temperature + top
    by_floor = first - _bin_of(lowest.to(tl.float32), temperature, fineness) + 1.0
    by_floor = tl.where((by_floor >= 0) & (by_floor < bins), by_floor, bins * 1.0).to(tl.int32)
    last = by_floor
    if (num_best > 0) & (num_best < size):
        last = tl.minimum(last, tl.sum((num_above < num_best).to(tl.int32), 0))
    return last, by_floor


@triton.jit
def _edge_in_bins(found, whole, share, first, top, temperature, by_floor, fineness: tl.constexpr):
    """Return about how many bins below the highest score top-p ends.

    It sums from the lower end, where bins have many tokens, so that their mean weight is known. whole: the sum of shares.
    """
    bins: tl.constexpr = found.shape[0]
    bin = tl.arange(0, bins)
    distance = (first + 0.5 - bin) / fineness - top / temperature
    mass = tl.where(bin <= by_floor, found * tl.exp(tl.minimum(distance, 0.0)), 0.0)
    # The last bin is taken to continue the decline of the bins above it.
    near_end = tl.sum(tl.where((bin >= bins - 9) & (bin < bins - 1), mass, 0.0), 0)
    before_end = tl.sum(tl.where((bin >= bins - 17) & (bin < bins - 9), mass, 0.0), 0)
    decline = tl.maximum(before_end - near_end, 0.05 * (before_end + near_end)) + 1e-30
    tail = (
        tl.sum(mass, 0) - tl.cumsum(mass, 0) + tl.where(by_floor < bins, 0.0, near_end * near_end / decline)
    )
    goal = (1.0 - share) * whole
    edge = tl.minimum(tl.sum((tail >= goal).to(tl.int32), 0), bins - 1)
    # The mass declines or grows exponentially within a bin, which the bins beside it show.
    of_edge = tl.sum(tl.where(bin == edge, mass, 0.0), 0)
    above_edge = tl.sum(tl.where(bin == edge - 1, mass, 0.0), 0)
    below_edge = tl.sum(tl.where(bin == edge + 1, mass, 0.0), 0)
    width: tl.constexpr = 1.0 / fineness
    tail_of_edge = tl.sum(tl.where(bin == edge, tail, 0.0), 0) * (1.0 - width * width / 24.0)
    missing = goal - tail_of_edge - (of_edge + below_edge) * (width * (1.0 - width) / 24.0)
    part = 1.0 - tl.minimum(tl.maximum(missing / of_edge, 0.0), 1.0)
    slope = 0.5 * tl.log((above_edge + 1e-30) / (below_edge + 1e-30))
    slope = tl.minimum(tl.maximum(slope, -2.0), 2.0)
    curved = tl.log(1.0 - part * (1.0 - tl.exp(-slope))) / -slope
    return edge, edge + tl.where(tl.abs(slope) > 0.01, curved, part)


@triton.jit
def _weight_at(position, first, top, temperature, scale: tl.constexpr, fineness: tl.constexpr):
    """Return about the weight at ``position`` bins below the upper end of the highest bin, without its lower bits."""
    distance = (first + 1.0 - position) / fineness - top / temperature
    return tl.floor(tl.exp(tl.minimum(distance, 0.5)) * scale / 1024)


@triton.jit
def _range_of_edge(
    found,
    num_above,
    whole,
    share,
    first,
    top,
    temperature,
    by_floor,
    scale: tl.constexpr,
    fineness: tl.constexpr,
    room: tl.constexpr,
):
    """Return a range of weights (above the first, up to the second) that ought to hold the edge of top-p.

    It holds all the best tokens if they find room, else those near the edge.
    """
    bins: tl.constexpr = found.shape[0]
    bin = tl.arange(0, bins)
    edge, position = _edge_in_bins(found, whole, share, first, top, temperature, by_floor, fineness)
    num_whole = tl.minimum(tl.sum((num_above <= room - 64).to(tl.int32), 0), bins - 1)
    num_short = tl.sum((num_above <= room // 4).to(tl.int32), 0)
    upper = position * 0.0 - 2.0 * fineness
    lower = tl.minimum(num_whole, tl.maximum(num_short, edge + 8)).to(tl.float64)
    if position + 1.0 > num_whole:
        most = tl.max(tl.where((bin >= edge - 1) & (bin <= edge + 1), found, 0), 0)
        margin = tl.minimum(room * 0.25 / tl.maximum(most, 1), 1.0)
        upper = position - margin
        lower = position + margin
    low = _weight_at(lower, first, top, temperature, scale, fineness)
    high = _weight_at(upper, first, top, temperature, scale, fineness)
    return tl.where((edge >= bins - 1) & (position + 1.0 > num_whole), -1.0, low), high


@triton.jit
def _outside(score, temperature, direction: tl.constexpr):
    """Return a score that is in this direction by more than what float32 rounds."""
    return score + direction * (tl.abs(score) * 1e-6 + temperature * 1e-5)


@triton.jit(do_not_specialize=VARYING)
def plan_kernel(
    settings, highest, sums, counts, plans, modes, size, num_parts, num_rows,
    scale: tl.constexpr, has_bounds: tl.constexpr, fineness: tl.constexpr, bins: tl.constexpr, room: tl.constexpr,
    parts: tl.constexpr,
):  # fmt: skip
    """Decide which tokens of a row are listed: all that may be drawn, or those of weights around the edge of top-p."""
    index = tl.program_id(0)
    part = tl.arange(0, parts)
    tops = tl.load(highest + index * num_parts + part, mask=part < num_parts, other=float("-inf"))
    top = tl.max(tops, 0)
    mode = SUMMED * 1
    low = tl.full([], -1.0, tl.float64)
    high = tl.full([], -1.0, tl.float64)
    lowest = tl.full([], float("inf"), tl.float64)
    highest_listed = tl.full([], float("inf"), tl.float64)
    each = tl.load(sums + index * num_parts + part, mask=part < num_parts, other=0.0)
    if (tl.max((each != each).to(tl.int32), 0) > 0) | (top == float("-inf")):
        mode = NO_NUMBERS * 1
    elif has_bounds:
        temperature = temperature_of(settings, num_rows, index)
        share = share_of(settings, num_rows, index)
        least = tl.load(settings + LEAST * num_rows + index)
        num_best = tl.load(settings + NUM_BEST * num_rows + index)
        first = _bin_of(top, temperature, fineness)
        own = counts + index.to(tl.int64) * num_parts * bins
        found = _merged(own, highest + index * num_parts, first, temperature, num_parts, fineness, bins)
        num_above = tl.cumsum(found, 0)
        last, by_floor = _last_bin(num_above, top, first, temperature, least, num_best, size, scale, fineness)
        # One bin more, since a score at its border may be counted in the one or the other.
        num_listed = tl.sum(tl.where(tl.arange(0, bins) == last + 1, num_above, 0), 0)
        if (last + 1 < bins - 1) & (num_listed <= room - 64):
            mode = LISTED * 1
            lowest = _outside(
                (first - (last + 1)).to(tl.float64) / _per_bin(temperature, fineness), temperature, -1.0
            )
        elif (num_best > 0) & (num_best < size):
            mode = SEARCHED * 1
        elif share < 1.0:
            shares = tl.where(tops > float("-inf"), each * tl.exp((tops - top) / temperature), 0.0)
            low, high = _range_of_edge(
                found, num_above, tl.sum(shares, 0), share, first, top, temperature, by_floor, scale, fineness, room
            )  # fmt: skip
            bottom = tl.maximum((low + 1.0) * 1024.0 - 1.0, 0.5) / scale
            lowest = _outside(top + tl.log(bottom) * temperature, temperature, -1.0)
            highest_listed = _outside(
                top + tl.log((high + 1.0) * 1024.0 / scale) * temperature, temperature, 1.0
            )
    tl.store(plans + index * 5, top.to(tl.float64))
    tl.store(plans + index * 5 + 1, low)
    tl.store(plans + index * 5 + 2, high)
    tl.store(plans + index * 5 + 3, lowest)
    tl.store(plans + index * 5 + 4, highest_listed)
    tl.store(modes + index * 2, mode)
    tl.store(modes + index * 2 + 1, 0)


@triton.jit
def _append(score, at, is_listed, counter, listed, room: tl.constexpr):
    """Write these tokens behind those that are listed; what finds no room is only counted."""
    places = tl.atomic_add(counter + tl.zeros(at.shape, tl.int32), 1, is_listed, sem="relaxed")
    word = (score.to(tl.int32, bitcast=True).to(tl.int64) << 32) | at.to(tl.int64)
    tl.store(listed + places, word, mask=is_listed & (places < room))


@triton.jit(do_not_specialize=VARYING)
def gather_kernel(
    scores,
    settings,
    plans,
    modes,
    part_sums,
    listed,
    row_stride,
    size,
    num_rows,
    scale: tl.constexpr,
    has_bounds: tl.constexpr,
    room: tl.constexpr,
    length: tl.constexpr,
    tile: tl.constexpr,
):
    """Write the sums of a part's weights and of those above the range, and list its tokens in the range, in any order.

    length: the tokens of a part; tile: those that are read together. A few tokens beside the range are listed, too.
    """
    part = tl.program_id(0)
    index = tl.program_id(1)
    mode = tl.load(modes + index * 2)
    counter = modes + index * 2 + 1
    listed += index * room
    lowest = tl.load(plans + index * 5 + 3).to(tl.float32)
    highest = tl.load(plans + index * 5 + 4).to(tl.float32)
    if mode == SUMMED:
        temperature = temperature_of(settings, num_rows, index)
        least = tl.load(settings + LEAST * num_rows + index)
        top = tl.load(plans + index * 5)
        high = tl.load(plans + index * 5 + 2).to(tl.int32)
        totals = tl.zeros([tile], tl.int64)
        above = tl.zeros([tile], tl.int64)
        for start in range(part * length, (part + 1) * length, tile):
            at = start + tl.arange(0, tile)
            score = scores_at(scores, settings, index, row_stride, at, size)
            if has_bounds:
                _append(score, at, (score >= lowest) & (score <= highest), counter, listed, room)
            weight = weights_of(score, top, temperature, least, scale)
            totals += weight
            if has_bounds:
                above += tl.where((weight >> 10).to(tl.int32) > high, weight, 0)
        pair = part_sums + (index * tl.num_programs(0) + part) * 2
        tl.store(pair, tl.sum(totals, 0))
        tl.store(pair + 1, tl.sum(above, 0))
    elif mode == LISTED:
        for start in range(part * length, (part + 1) * length, tile):
            at = start + tl.arange(0, tile)
            score = scores_at(scores, settings, index, row_stride, at, size)
            _append(score, at, score >= lowest, counter, listed, room)
