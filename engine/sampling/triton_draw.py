"""Sample tokens by Triton's kernels, with the tokens of ``engine.sampling.sampler.draw_by_torch``.

Torch sorts the whole vocabulary of each row for top-p. The kernels read a row twice: to count scores in bins, from which
they estimate which tokens are at the edge of top-p, and to sum the weights and list those tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.triton_sizes import power_of_two
from engine.compute.staging import to_device
from engine.sampling import triton_choosing, triton_kernels, triton_search
from engine.sampling.logits_processors import SamplingRow
from engine.sampling.sampler import WEIGHT_SCALE

SCALE = int(WEIGHT_SCALE)
FINENESS = 6.0
"""Bins of scores per factor e of the weight."""
BINS = 128
ROOM = 4096
"""The tokens of a row that can be listed."""
SURVEY_TILE = 4096
TILE = 512
CHOOSING_TILE = 2048
"""The tokens that a program reads together: many are counted in bins faster, few leave registers for more programs."""
NUM_WARPS = 4
CHOOSING_WARPS = 8
CHOOSING_REGISTERS = 128
"""Two programs of ``choose_kernel`` find room on a multiprocessor."""
SEARCHING_WARPS = 16
_WORD = 2**64 - 1


def draw_by_triton(scores: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """See ``engine.sampling.sampler.Draw``."""
    settings = settings_of(rows)
    return launch(scores, to_device(settings, scores.device), has_bounds(settings, scores.shape[1])).tokens


def settings_of(rows: Sequence[SamplingRow]) -> NDArray[np.int64]:
    """Return the parameters of each row, one column each; see ``triton_weights.PLACE``.

    A row with temperature 0 draws one of its best token.
    """
    settings = np.empty((8, len(rows)), dtype=np.int64)
    floats = settings.view(np.float64)
    words = settings.view(np.uint64)
    samplings = [row.sampling for row in rows]
    is_random = np.array([each.temperature > 0 for each in samplings])
    settings[0] = np.arange(len(rows))
    floats[1] = np.where(is_random, [each.temperature for each in samplings], 1.0)
    floats[2] = np.where(is_random, [each.top_p for each in samplings], 1.0)
    settings[3] = [round(each.min_p * WEIGHT_SCALE) for each in samplings]
    settings[4] = np.where(is_random, [each.top_k for each in samplings], 1)
    words[5] = [each.seed & _WORD for each in samplings]
    words[6] = [each.seed >> 64 & _WORD for each in samplings]
    settings[7] = [row.position for row in rows]
    return settings


def has_bounds(settings: NDArray[np.int64], size: int) -> bool:
    """Return True if top-p, min-p or top-k bound the tokens of a row."""
    is_narrow = (settings[4] > 0) & (settings[4] < size)
    return bool((settings[2].view(np.float64) < 1.0).any() or settings[3].any() or is_narrow.any())


class Launched(NamedTuple):
    """Tokens that are being drawn.

    tokens: see ``engine.sampling.sampler.Draw``. modes: int32 ``[num_rows, 2]``, how each row is drawn, and how many of its
    tokens are listed.
    """

    tokens: Tensor
    modes: Tensor


def launch(scores: Tensor, settings: Tensor, is_bounded: bool) -> Launched:
    """Run the kernels. settings: see ``settings_of``; is_bounded: see ``has_bounds``."""
    device = scores.device
    num_rows = settings.shape[1]
    size = scores.shape[1]
    # Few rows are surveyed in more parts, so that all multiprocessors have some.
    tile = 1024 if num_rows <= 4 else 2048 if num_rows <= 16 else SURVEY_TILE
    num_tiles = -(-size // tile)
    length = 2 * tile
    num_parts = -(-size // length)
    highest = torch.empty(2, num_rows, num_tiles, dtype=torch.float32, device=device)
    counts = torch.empty(num_rows, num_tiles, BINS if is_bounded else 0, dtype=torch.int32, device=device)
    plans = torch.empty(num_rows, 5, dtype=torch.float64, device=device)
    modes = torch.empty(num_rows, 2, dtype=torch.int32, device=device)
    part_sums = torch.empty(num_rows, num_parts, 2, dtype=torch.int64, device=device)
    listed = torch.empty(num_rows, ROOM, dtype=torch.int64, device=device)
    tokens = torch.empty(2, num_rows, dtype=torch.int64, device=device)
    stride = scores.stride(0)
    bounds = {"scale": SCALE, "has_bounds": is_bounded}
    bins = {"fineness": FINENESS, "bins": BINS}
    triton_kernels.survey_kernel[(num_tiles, num_rows)](
        scores, settings, highest[0], highest[1], counts, stride, size, num_rows,
        has_bounds=is_bounded, **bins, tile=tile, num_warps=NUM_WARPS,
    )  # fmt: skip
    triton_kernels.plan_kernel[(num_rows,)](
        settings, *highest, counts, plans, modes, size, num_tiles, num_rows,
        **bounds, **bins, room=ROOM, parts=power_of_two(num_tiles), num_warps=NUM_WARPS,
    )  # fmt: skip
    triton_kernels.gather_kernel[(num_parts, num_rows)](
        scores, settings, plans, modes, part_sums, listed, stride, size, num_rows,
        **bounds, room=ROOM, length=length, tile=TILE, num_warps=NUM_WARPS,
    )  # fmt: skip
    triton_choosing.choose_kernel[(num_rows,)](
        scores, settings, plans, modes, part_sums, listed, tokens, stride, size, num_parts, num_rows,
        **bounds, room=ROOM, parts=power_of_two(num_parts), length=length, tile=CHOOSING_TILE,
        num_warps=CHOOSING_WARPS, maxnreg=CHOOSING_REGISTERS,
    )  # fmt: skip
    if is_bounded:
        triton_search.search_kernel[(num_rows,)](
            scores, settings, plans, modes, tokens, stride, size, num_rows,
            scale=SCALE, tile=CHOOSING_TILE, num_warps=SEARCHING_WARPS,
        )  # fmt: skip
    return Launched(tokens, modes)
