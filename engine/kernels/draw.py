"""Sample tokens by the kernels, like ``engine.sampling.sampler.random_by_torch``, row by row, without copies."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels.binding import DRAW, Kernels
from engine.sampling.logits_processors import SamplingRow
from engine.sampling.sampler import best_or_drawn

_SEEDS = 2**128


class KernelDraw:
    """See ``engine.sampling.sampler.Draw``. threads: the kernels' threads; None: the caller samples alone."""

    def __init__(self, kernels: Kernels, threads: int | None = None, num_threads: int = 1) -> None:
        self._kernels = kernels
        self._threads = threads
        self._num_threads = num_threads
        self._scratch: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def __call__(self, scores: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """Sample from float32 ``[num_rows, vocab_size]`` on the host."""
        return best_or_drawn(self.random, scores, rows)

    def random(self, scores: Tensor, rows: Sequence[SamplingRow], places: Sequence[int]) -> Tensor:
        """See ``engine.sampling.sampler.RandomDraw``."""
        scores = scores.contiguous()
        size = scores.shape[1]
        needed = self._num_threads * self._kernels.draw_scratch(size)
        if len(self._scratch) < needed:
            self._scratch = np.empty(needed, dtype=np.int64)
        tokens = np.empty(len(places), dtype=np.int64)
        draws = draws_of([rows[place] for place in places])
        draws["scores"] = scores.data_ptr() + np.array(places) * (size * scores.element_size())
        self._kernels.draw(self._threads, draws, size, self._scratch, tokens)
        return torch.from_numpy(tokens)


def draws_of(rows: Sequence[SamplingRow]) -> NDArray[np.void]:
    """Return each row's parameters, without the address of its scores."""
    draws = np.zeros(len(rows), dtype=DRAW)
    seeds = [row.sampling.seed % _SEEDS for row in rows]
    draws["seed"] = [(seed % 2**64, seed // 2**64) for seed in seeds]
    draws["position"] = [row.position for row in rows]
    for name in ("temperature", "min_p", "top_p", "top_k"):
        draws[name] = [getattr(row.sampling, name) for row in rows]
    return draws
