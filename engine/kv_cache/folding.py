"""Computes the sums of KV blocks' digests where the blocks are: on a device, by a Triton kernel.

Word j of a block (64 bits) has the key ``seed + j · _STEP``. The first sum of ``fold64`` adds the product of the lower and
the upper half of each word that was xored with its key; the second one adds the words. Sums are modulo 2**64, so they do
not depend on the order in which parts of a block are added.
"""

import importlib.util
import logging
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.compute.staging import to_device

logger = logging.getLogger(__name__)
Numbers = npt.NDArray[np.uint64]
Fold = Callable[[Sequence[int], int, int, Numbers], Numbers]
"""(blocks, first byte, end, seeds) → sums ``[2, n]``. Waits for the device."""

WORD_BYTES = 8
_STEP = 0x9E3779B97F4A7C15
TILE = 1024
NUM_TILES = 4
NUM_WARPS = 4


def signed(number: int) -> int:
    """Return the signed number with the same 64 bits: the kernel counts by these, which wrap like others."""
    return (number + 2**63) % 2**64 - 2**63


STEPS = {"step": signed(_STEP), "tile_step": signed(TILE * _STEP)}


class TritonFold:
    """Adds up blocks of a pool, a contiguous tensor whose blocks have whole words."""

    def __init__(self, pool: Tensor) -> None:
        self._words = pool.view(len(pool), -1).view(torch.int64)

    def __call__(self, block_ids: Sequence[int], start: int, end: int, seeds: Numbers) -> Numbers:
        """See ``Fold``."""
        from engine.kv_cache.triton_kernels import fold_kernel

        count = len(block_ids)
        packed = np.zeros((4, count), np.int64)
        packed[0] = block_ids
        packed[1] = seeds.view(np.int64)
        on_device = to_device(packed, self._words.device)
        num_words = (end - start) // WORD_BYTES
        block_words = self._words.shape[1]
        fold_kernel[(count, -(-num_words // (TILE * NUM_TILES)))](
            self._words,
            on_device,
            count,
            block_words,
            start // WORD_BYTES,
            num_words,
            **STEPS,
            tile=TILE,
            num_tiles=NUM_TILES,
            num_warps=NUM_WARPS,
        )
        return on_device[2:].cpu().numpy().view(np.uint64)


def find_fold(pool: Tensor) -> Fold | None:
    """Return what adds up blocks of a pool ``[num_blocks, num_layers, ...]``, tried out; None, and log why, if none can."""
    if pool.device.type != "cuda":
        return None
    why_not = why_no_words(pool)
    if why_not is None:
        try:
            fold = TritonFold(pool)
            fold([0], 0, WORD_BYTES, np.zeros(1, np.uint64))
        except Exception as error:  # noqa: BLE001 - whatever a compiler raises
            why_not = repr(error)
        else:
            return fold
    logger.warning("blocks are copied to the host to be digested: %s", why_not)
    return None


def why_no_words(pool: Tensor) -> str | None:
    """Return why blocks of a pool cannot be added up by Triton; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    layer_bytes = pool[0, 0].numel() * pool.element_size()
    if layer_bytes % WORD_BYTES:
        return f"a layer of a block has {layer_bytes} bytes, which is no multiple of {WORD_BYTES}"
    return None
