"""One uniform number per (seed, position): the whole randomness of sampling (law 6)."""

import numpy as np

UNIFORM_BITS = 53


def uniform_bits(seed: int, position: int) -> int:
    """A whole number in ``[0, 2**53)`` that depends on ``seed`` and ``position`` alone, on every machine.

    Philox 4x64 (Salmon et al. 2011) with the seed as its key and the position as its counter: no state is carried
    from one token to the next, so a replay draws what the first run drew.
    """
    stream = np.random.Philox(key=seed % 2**128, counter=position)
    return int(stream.random_raw()) >> (64 - UNIFORM_BITS)
