"""The sums of the digest ``fold64`` over host memory: in C (``fold.c``), or slowly in NumPy without a compiler."""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kv_transfer.native.compiling import load_function

Numbers = npt.NDArray[np.uint64]
WORD_BYTES = 8
_STEP = 0x9E3779B97F4A7C15
_LOWER_HALF = np.uint64(2**32 - 1)
_HALF_BITS = np.uint64(32)

FoldWords = Callable[[Numbers, Numbers, Numbers, int, int], None]
"""(sums [2, n], addresses [n], seeds [n], first word, number of words): adds both sums of these words of n blocks.

Each address is that of the first word, which need not be aligned. ``fold.c`` defines the sums.
"""


@cache
def fold_words() -> FoldWords:
    """Return the fastest function that works here."""
    return load_fold() or fold_by_numpy


def load_fold(
    prebuilt: Path | None = None, folder: Path | None = None, compiler: str = "cc"
) -> FoldWords | None:
    """Return ``kvbaton_fold``, or None (and log why) if it cannot be compiled or loaded. folder: see load_copy_blocks."""
    address = ctypes.c_void_p
    types = (address, address, address, ctypes.c_size_t, ctypes.c_uint64, ctypes.c_size_t)
    instead = "slower digests of KV from a device"
    fold = load_function("kvbaton_fold", types, instead, prebuilt, folder, compiler)
    if fold is None:
        return None

    def fold_by_c(sums: Numbers, addresses: Numbers, seeds: Numbers, first_word: int, num_words: int) -> None:
        fold(sums.ctypes.data, addresses.ctypes.data, seeds.ctypes.data, len(seeds), first_word, num_words)

    return fold_by_c


def fold_by_numpy(sums: Numbers, addresses: Numbers, seeds: Numbers, first_word: int, num_words: int) -> None:
    """See ``FoldWords``."""
    places = np.arange(first_word, first_word + num_words, dtype=np.uint64) * np.uint64(_STEP)
    for number, address in enumerate(addresses.tolist()):
        content = memoryview((ctypes.c_char * (num_words * WORD_BYTES)).from_address(address))
        words = np.frombuffer(content, np.dtype("<u8"))
        mixed = words ^ (places + seeds[number])
        sums[0, number : number + 1] += np.sum((mixed & _LOWER_HALF) * (mixed >> _HALF_BITS), keepdims=True)
        sums[1, number : number + 1] += np.sum(words, keepdims=True)
