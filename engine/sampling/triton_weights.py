"""Parts of the Triton kernels that draw tokens: a row's parameters, its weights, and its random number."""

import triton
import triton.language as tl

VARYING = ["num_rows", "num_parts"]
"""Numbers that differ from step to step: no kernel is compiled for one of them."""
LISTED = tl.constexpr(0)
"""Modes of a row: all tokens that may be drawn are listed; a range of weights is; nothing helps; nothing can be drawn."""
SUMMED = tl.constexpr(1)
SEARCHED = tl.constexpr(2)
NO_NUMBERS = tl.constexpr(3)
ROUNDER = tl.constexpr(6755399441055744.0)
ROUNDER_BITS = tl.constexpr(0x4338000000000000)
PLACE = tl.constexpr(0)
"""The rows of ``settings``, int64 ``[8, num_rows]``; temperature and share are float64."""
TEMPERATURE = tl.constexpr(1)
SHARE = tl.constexpr(2)
LEAST = tl.constexpr(3)
NUM_BEST = tl.constexpr(4)
SEED = tl.constexpr(5)
UPPER_SEED = tl.constexpr(6)
POSITION = tl.constexpr(7)


@triton.jit
def num_of(mask):
    """Return how many places of a mask are set."""
    return tl.sum(mask.to(tl.int32), 0)


@triton.jit
def temperature_of(settings, num_rows, index):
    """Return a row's temperature in float64."""
    return tl.load(settings + TEMPERATURE * num_rows + index).to(tl.float64, bitcast=True)


@triton.jit
def share_of(settings, num_rows, index):
    """Return a row's top-p in float64."""
    return tl.load(settings + SHARE * num_rows + index).to(tl.float64, bitcast=True)


@triton.jit
def scores_at(scores, settings, index, row_stride, at, size):
    """Return a row's scores of some tokens in float32; those beyond the vocabulary are barred."""
    own = scores + tl.load(settings + PLACE + index) * row_stride
    return tl.load(own + at, mask=at < size, other=float("-inf")).to(tl.float32)


@triton.jit
def _times(value, factor, addend: tl.constexpr):
    """Return ``value * factor + addend``, rounded once, in float64."""
    return tl.fma(value, factor, tl.full([], addend, tl.float64))


@triton.jit
def weights_of(score, top, temperature, least, scale: tl.constexpr):
    """Return probabilities as whole numbers, int64: ``scale`` for the best token, 0 for those below ``least``.

    ``scale`` is 2**40. Quotient and exponential are rounded as CUDA's own, whose branches would take twice as long: by a
    product with the inverse and the remainder's share, and by the polynomial of its library.
    """
    inverse = 1.0 / temperature
    distance = score.to(tl.float64) - top
    near = distance * inverse
    near = tl.fma(tl.fma(-near, temperature, distance), inverse, near)
    shifted = _times(near, tl.full([], 1.4426950408889634, tl.float64), ROUNDER)
    power = shifted - ROUNDER
    rest = tl.fma(power, tl.full([], -0.6931471805599453, tl.float64), near)
    rest = tl.fma(power, tl.full([], -2.3190468138462996e-17, tl.float64), rest)
    share = _times(tl.full([], 2.502232253650299e-08, tl.float64), rest, 2.763090348817311e-07)
    share = _times(share, rest, 2.755751454588244e-06)
    share = _times(share, rest, 2.4801491039099165e-05)
    share = _times(share, rest, 0.00019841269589115497)
    share = _times(share, rest, 0.001388888894591638)
    share = _times(share, rest, 0.008333333333455043)
    share = _times(share, rest, 0.041666666666519754)
    share = _times(share, rest, 0.16666666666666477)
    share = _times(share, rest, 0.5000000000000012)
    share = _times(share, rest, 1.0)
    share = _times(share, rest, 1.0)
    exponent = (shifted.to(tl.int64, bitcast=True) + 40) << 52
    scaled = (share.to(tl.int64, bitcast=True) + exponent).to(tl.float64, bitcast=True)
    # Adding 1.5 · 2**52 rounds to a whole number, halves to the even one, and leaves it in the lower bits.
    rounded = scaled + ROUNDER
    # Below exp(-30), the weight is 0 and the exponent may be too small to be represented.
    is_drawn = (distance >= -30.0 * temperature) & (rounded >= least.to(tl.float64) + ROUNDER)
    return tl.where(is_drawn, rounded.to(tl.int64, bitcast=True) - ROUNDER_BITS, 0)


@triton.jit
def uniform_of(settings, num_rows, index):
    """Return a row's 53 random bits by Philox 4x64; see ``engine.sampling.randomness``."""
    key = tl.load(settings + SEED * num_rows + index).to(tl.uint64, bitcast=True)
    other_key = tl.load(settings + UPPER_SEED * num_rows + index).to(tl.uint64, bitcast=True)
    first = tl.load(settings + POSITION * num_rows + index).to(tl.uint64, bitcast=True) + 1
    second = first * 0
    third = first * 0
    fourth = first * 0
    factor = tl.full([], 0xD2E7470EE14C6C93, tl.uint64)
    other_factor = tl.full([], 0xCA5A826395121157, tl.uint64)
    for _ in range(10):
        high = tl.umulhi(factor, first)
        other_high = tl.umulhi(other_factor, third)
        low = factor * first
        other_low = other_factor * third
        first = other_high ^ second ^ key
        second = other_low
        third = high ^ fourth ^ other_key
        fourth = low
        key += tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
        other_key += tl.full([], 0xBB67AE8584CAA73B, tl.uint64)
    return (first >> 11).to(tl.int64)


@triton.jit
def scaled(uniform, total):
    """Return ``uniform * total >> 53``; see ``engine.sampling.sampler.scaled``."""
    upper = uniform >> 27
    lower = uniform & 134217727
    high = total >> 29
    low = total & 536870911
    middle = upper * low + ((lower * high) << 2) + ((lower * low) >> 27)
    return ((upper * high) << 3) + (middle >> 26)


@triton.jit
def order_of(score):
    """Return whole numbers in the order of scores; both zeros are equal."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def num_kept_at(above, edge, num_equal, limit):
    """Return how many weights equal to ``edge`` are kept, at least one."""
    num_kept = edge * 0
    beyond = edge * 0 + num_equal
    while num_kept < beyond:
        middle = (num_kept + beyond) // 2
        if (above + middle * edge).to(tl.float64) < limit:
            num_kept = middle + 1
        else:
            beyond = middle
    return tl.maximum(num_kept, 1)
