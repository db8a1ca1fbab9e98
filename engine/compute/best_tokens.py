"""The best token of each row of logits, on the device."""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.compute.launching import overlap_of

BestTokens = Callable[[Tensor, Tensor], None]
"""Logits ``[num_rows, vocab_size]``; writes into int64 ``[num_rows, 2]`` the best token, the lowest id among equals, and 1
if its logit is a number (NaN is best), else 0."""

TILE = 8192
NUM_WARPS = 8
MOST_PROGRAMS = 1024
"""Programs of a batch. They occupy a device; more would only add ends of rows, at which programs meet."""


def find_by_torch(logits: Tensor, best: Tensor) -> None:
    """See BestTokens."""
    top = logits.max(dim=-1)
    best[:, 0].copy_(top.indices)
    best[:, 1].copy_(top.values.isfinite())


class TritonBestTokens:
    """See BestTokens. One kernel reads the logits once; the first call has the most rows."""

    def __init__(self, most_programs: int = MOST_PROGRAMS) -> None:
        self._most_programs = most_programs
        self._keys: Tensor | None = None
        self._counters: Tensor | None = None

    def __call__(self, logits: Tensor, best: Tensor) -> None:
        """See BestTokens."""
        from engine.compute.triton_kernels import best_kernel

        num_rows, size = logits.shape
        if self._keys is None or self._counters is None:
            self._keys = torch.zeros(num_rows, dtype=torch.int64, device=logits.device)
            self._counters = torch.zeros(num_rows, dtype=torch.int32, device=logits.device)
        num_parts = min(-(-size // TILE), max(1, self._most_programs // num_rows))
        best_kernel[num_parts, num_rows](
            logits,
            self._keys,
            self._counters,
            best,
            logits.stride(0),
            size,
            tile=TILE,
            num_warps=NUM_WARPS,
            **overlap_of(logits.device),
        )
