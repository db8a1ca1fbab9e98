"""One uniform number per (seed, position): the only randomness of sampling (law 6)."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

UNIFORM_BITS = 53
_MANY = 40
_ROUNDS = 10
_FACTORS = (np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157))
_KEY_STEPS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B))
_HALF = np.uint64(32)
_LOW = np.uint64(2**32 - 1)
_Words = NDArray[np.uint64]


def uniform_bits(seed: int, position: int) -> int:
    """Return a whole number in ``[0, 2**53)`` that depends only on ``seed`` and ``position``, on every machine.

    Philox 4x64 (Salmon et al. 2011) with the seed as key and the position as counter. No state is carried from one token
    to the next, so a replay samples the tokens of the first run.
    """
    stream = np.random.Philox(key=seed % 2**128, counter=position)
    return int(stream.random_raw()) >> (64 - UNIFORM_BITS)


def uniform_bits_of(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.int64]:
    """Return ``uniform_bits`` of each pair; many are computed together, which takes as long as 40 generators."""
    if len(seeds) < _MANY:
        return np.array(list(map(uniform_bits, seeds, positions)), dtype=np.int64)
    keys = [seed % 2**128 for seed in seeds]
    key = _words([each % 2**64 for each in keys])
    other_key = _words([each >> 64 for each in keys])
    counters = [position + 1 for position in positions]  # a generator counts before it draws
    first = _words([each % 2**64 for each in counters])
    second = _words([each >> 64 for each in counters])
    third = np.zeros_like(first)
    fourth = np.zeros_like(first)
    for _ in range(_ROUNDS):
        high, low = _product(_FACTORS[0], first)
        other_high, other_low = _product(_FACTORS[1], third)
        first = other_high ^ second ^ key
        second = other_low
        third = high ^ fourth ^ other_key
        fourth = low
        key = key + _KEY_STEPS[0]
        other_key = other_key + _KEY_STEPS[1]
    return (first >> np.uint64(64 - UNIFORM_BITS)).astype(np.int64)


def _words(numbers: Sequence[int]) -> _Words:
    return np.array(numbers, dtype=np.uint64)


def _product(factor: np.uint64, words: _Words) -> tuple[_Words, _Words]:
    """Return the upper and lower 64 bits of each product."""
    upper = factor >> _HALF
    lower = factor & _LOW
    high = words >> _HALF
    low = words & _LOW
    middle = upper * low + (lower * low >> _HALF)
    other = lower * high + (middle & _LOW)
    return upper * high + (middle >> _HALF) + (other >> _HALF), factor * words
