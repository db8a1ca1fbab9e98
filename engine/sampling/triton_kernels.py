"""Triton kernels that draw tokens at random, one program for each row, exactly as ``engine.sampling.sampler`` does by torch.

Weights are whole numbers, so sums are exact in any order. Imported only if Triton is installed.
"""

import triton
import triton.language as tl


@triton.jit
def weigh_kernel(
    scores, places, temperatures, least, weights, row_stride, size, scale: tl.constexpr, tile: tl.constexpr
):
    """Write each row's probabilities as whole numbers, ``scale`` for the best token; 0 for those below ``least``."""
    index = tl.program_id(0)
    own = scores + tl.load(places + index) * row_stride
    target = weights + index.to(tl.int64) * size
    at = tl.arange(0, tile)
    highest = tl.full([tile], float("-inf"), tl.float32)
    for start in range(0, size, tile):
        highest = tl.maximum(highest, tl.load(own + start + at, mask=start + at < size, other=float("-inf")))
    top = tl.max(highest, 0).to(tl.float64)
    temperature = tl.load(temperatures + index)
    floor = tl.load(least + index)
    for start in range(0, size, tile):
        is_there = start + at < size
        score = tl.load(own + start + at, mask=is_there, other=float("-inf")).to(tl.float64)
        share = tl.exp((score - top) / temperature) * scale
        # Adding and subtracting 1.5 · 2**52 rounds to a whole number, halves to the even one.
        weight = ((share + 6755399441055744.0) - 6755399441055744.0).to(tl.int64)
        tl.store(target + start + at, tl.where(weight < floor, 0, weight), mask=is_there)


@triton.jit
def _scaled(uniform, total, uniform_bits: tl.constexpr):
    """Return ``uniform * total >> uniform_bits``; see ``engine.sampling.sampler.scaled``."""
    upper = uniform >> 27
    lower = uniform & 134217727
    high = total >> 29
    low = total & 536870911
    middle = upper * low + ((lower * high) << 2) + ((lower * low) >> 27)
    return ((upper * high) << 3) + (middle >> (uniform_bits - 27))


@triton.jit
def _edge_of(own, size, limit, most, tile: tl.constexpr):
    """Return the least weight above which the row's weights sum to less than ``limit``: four times fewer in each round."""
    at = tl.arange(0, tile)
    low = most * 0 - 1
    high = most
    while high - low > 1:
        step = tl.maximum((high - low) // 4, 1)
        first = low + step
        second = tl.minimum(first + step, high)
        third = tl.minimum(second + step, high)
        above_first = tl.zeros([tile], tl.int64)
        above_second = tl.zeros([tile], tl.int64)
        above_third = tl.zeros([tile], tl.int64)
        for start in range(0, size, tile):
            weight = tl.load(own + start + at, mask=start + at < size, other=0)
            above_first += tl.where(weight > first, weight, 0)
            above_second += tl.where(weight > second, weight, 0)
            above_third += tl.where(weight > third, weight, 0)
        if (tl.sum(above_first, 0).to(tl.float64) < limit) | (first >= most):
            high = first
        elif (tl.sum(above_second, 0).to(tl.float64) < limit) | (second >= most):
            low = first
            high = second
        elif (tl.sum(above_third, 0).to(tl.float64) < limit) | (third >= most):
            low = second
            high = third
        else:
            low = third
    return high


@triton.jit
def _kept_at(own, size, limit, edge, tile: tl.constexpr):
    """Return how many weights equal to ``edge`` are kept, at least one, and the sum of all that are kept."""
    at = tl.arange(0, tile)
    sums = tl.zeros([tile], tl.int64)
    equals = tl.zeros([tile], tl.int64)
    for start in range(0, size, tile):
        weight = tl.load(own + start + at, mask=start + at < size, other=0)
        sums += tl.where(weight > edge, weight, 0)
        equals += tl.where(weight == edge, 1, 0)
    above = tl.sum(sums, 0)
    beyond = tl.sum(equals, 0)
    num_kept = edge * 0
    while num_kept < beyond:
        middle = (num_kept + beyond) // 2
        if (above + middle * edge).to(tl.float64) < limit:
            num_kept = middle + 1
        else:
            beyond = middle
    num_kept = tl.maximum(num_kept, 1)
    return num_kept, above + num_kept * edge


@triton.jit
def choose_kernel(
    weights,
    uniforms,
    shares,
    tokens,
    size,
    scale: tl.constexpr,
    uniform_bits: tl.constexpr,
    tile: tl.constexpr,
    reach: tl.constexpr,
):
    """Keep the smallest set of best tokens with the share ``shares`` of the row's weight, and draw one by its weight.

    Among equal weights at the edge the lowest ids are kept. tile: weights that are summed together; reach: those among which
    the token is found.
    """
    index = tl.program_id(0)
    own = weights + index.to(tl.int64) * size
    at = tl.arange(0, tile)
    sums = tl.zeros([tile], tl.int64)
    for start in range(0, size, tile):
        sums += tl.load(own + start + at, mask=start + at < size, other=0)
    total = tl.sum(sums, 0)
    share = tl.load(shares + index)
    edge = total * 0
    num_kept = total * 0
    if share < 1.0:
        limit = share * total.to(tl.float64)
        edge = _edge_of(own, size, limit, edge + scale, tile)
        num_kept, total = _kept_at(own, size, limit, edge, tile)
    goal = _scaled(tl.load(uniforms + index), total, uniform_bits)
    near = tl.arange(0, reach)
    token = size - 1
    before = total * 0
    num_seen = total * 0
    start = 0
    while start < size:
        is_there = start + near < size
        weight = tl.load(own + start + near, mask=is_there, other=0)
        is_equal = (weight == edge) & is_there
        place = tl.cumsum(is_equal.to(tl.int64), 0) + num_seen
        kept = tl.where((weight > edge) | (is_equal & (place <= num_kept)), weight, 0)
        has_passed = (tl.cumsum(kept, 0) + before > goal) & is_there
        found = tl.min(tl.where(has_passed, start + near, size), 0)
        before += tl.sum(kept, 0)
        num_seen += tl.sum(is_equal.to(tl.int64), 0)
        start += reach
        if found < size:
            token = found
            start = size
    tl.store(tokens + index, token.to(tl.int64))
