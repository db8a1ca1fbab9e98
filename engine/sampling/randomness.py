"""One uniform number per (seed, position): the only randomness of sampling (law 6)."""

import numpy as np

UNIFORM_BITS = 53


def uniform_bits(seed: int, position: int) -> int:
    """Return a whole number in ``[0, 2**53)`` that depends only on ``seed`` and ``position``, on every machine.

    Philox 4x64 (Salmon et al. 2011) with the seed as key and the position as counter. No state is carried from one token
    to the next, so a replay samples the tokens of the first run.
    """
    stream = np.random.Philox(key=seed % 2**128, counter=position)
    return int(stream.random_raw()) >> (64 - UNIFORM_BITS)
