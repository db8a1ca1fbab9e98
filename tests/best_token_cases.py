"""Checks of the kernel that finds best tokens, on any device, against torch."""

import torch

from engine.compute.best_tokens import MOST_PROGRAMS, TILE, TritonBestTokens, find_by_torch

SIZES = (1, 50, TILE, TILE + 1, 4 * TILE + 77)


def check_best_tokens(size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Check ties, both zeros, infinities, NaN, rows without any allowed token, and a smaller step after a larger one."""
    for most_programs in (1, 20, MOST_PROGRAMS):
        check_programs(TritonBestTokens(most_programs), size, dtype, device)


def check_programs(find: TritonBestTokens, size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Check one number of programs."""
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(9, size, generator=generator).to(dtype)
    logits[1] = logits[1].round()
    logits[2] = -0.0
    logits[2, size // 2] = 0.0
    logits[3] = -torch.inf
    logits[4, -1] = torch.inf
    logits[5, size // 3] = torch.nan
    logits[6] = -logits[6].abs() - 1
    logits[7] = torch.finfo(dtype).min
    for rows in (logits, logits[:2], logits[5:]):
        best = torch.full((len(rows), 2), -1, dtype=torch.int64, device=device)
        expected = torch.empty(len(rows), 2, dtype=torch.int64)
        find(rows.to(device), best)
        find_by_torch(rows, expected)
        assert best.tolist() == expected.tolist()
