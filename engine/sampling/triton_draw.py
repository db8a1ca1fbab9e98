"""Sample tokens by Triton's kernels, with the tokens of ``engine.sampling.sampler.draw_by_torch``.

Torch sorts the whole vocabulary of each row for top-p, and reads its weights about thirty times.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.compute.staging import to_device
from engine.sampling import triton_kernels
from engine.sampling.logits_processors import SamplingRow
from engine.sampling.randomness import UNIFORM_BITS
from engine.sampling.sampler import WEIGHT_SCALE, draw_by_torch, keep_top_k, uniforms_of

LEAST_ROWS = 24
"""A program takes one row, so the device must have many; fewer rows are faster by torch."""
_MAX_ROWS_AT_ONCE = 512
TILE = 2048
REACH = 1024
NUM_WARPS = 16


def draw_by_triton(scores: Tensor, rows: Sequence[SamplingRow], places: Sequence[int]) -> Tensor:
    """See ``engine.sampling.sampler.Draw``."""
    if len(places) < LEAST_ROWS:
        return draw_by_torch(scores, rows, places)
    parts = [places[start : start + _MAX_ROWS_AT_ONCE] for start in range(0, len(places), _MAX_ROWS_AT_ONCE)]
    return torch.cat([_draw(scores, [rows[i] for i in part], part) for part in parts])


def _draw(scores: Tensor, rows: Sequence[SamplingRow], places: Sequence[int]) -> Tensor:
    device = scores.device
    size = scores.shape[1]
    own = to_device(np.array(places), device)
    weights = torch.empty(len(rows), size, dtype=torch.int64, device=device)
    temperatures = np.array([row.sampling.temperature for row in rows], dtype=np.float64)
    least = np.array([round(row.sampling.min_p * WEIGHT_SCALE) for row in rows])
    scale = int(WEIGHT_SCALE)
    triton_kernels.weigh_kernel[(len(rows),)](
        scores,
        own,
        to_device(temperatures, device),
        to_device(least, device),
        weights,
        scores.stride(0),
        size,
        scale=scale,
        tile=TILE,
        num_warps=NUM_WARPS,
    )
    limits = [row.sampling.top_k for row in rows]
    if any(0 < k < size for k in limits):
        keep_top_k(weights, scores[own], limits)
    shares = np.array([row.sampling.top_p for row in rows], dtype=np.float64)
    tokens = torch.empty(len(rows), dtype=torch.int64, device=device)
    triton_kernels.choose_kernel[(len(rows),)](
        weights,
        to_device(uniforms_of(rows), device),
        to_device(shares, device),
        tokens,
        size,
        scale=scale,
        uniform_bits=UNIFORM_BITS,
        tile=TILE,
        reach=REACH,
        num_warps=NUM_WARPS,
    )
    return tokens
