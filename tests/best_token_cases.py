"""Checks of the kernel that finds best tokens, on any device, against torch."""

import torch

from engine.compute.best_tokens import (
    MOST_PROGRAMS,
    TILE,
    TorchBestTokens,
    TritonBestTokens,
    find_by_torch,
)

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
        check_keys(find, rows, expected, device)


def check_keys(
    find: TritonBestTokens, rows: torch.Tensor, expected: torch.Tensor, device: torch.device
) -> None:
    """Check the keys of columns that begin at some token, and of columns without their last one, and the tokens of keys."""
    for first_token in (0, 1, 123_456):
        keys, of_torch = (torch.full((len(rows),), -1, device=each) for each in (device, "cpu"))
        find.find_keys(rows.to(device), first_token, keys)
        TorchBestTokens().find_keys(rows, first_token, of_torch)
        assert keys.tolist() == of_torch.tolist()
        assert bool((of_torch > 0).all())
        best = torch.full((len(rows), 2), -1, device=device)
        find.read_keys(keys, best)
        assert best.tolist() == (expected + torch.tensor([first_token, 0])).tolist()
    own = rows[:, :-1]
    if own.shape[1]:
        keys, of_torch = (torch.full((len(rows),), -1, device=each) for each in (device, "cpu"))
        find.find_keys(rows.to(device)[:, :-1], 0, keys)
        TorchBestTokens().find_keys(own, 0, of_torch)
        assert keys.tolist() == of_torch.tolist()
    many = keys.repeat(50)
    best, of_torch = torch.full((2, len(many), 2), -1, device=device)
    find.read_keys(many, best)
    TorchBestTokens().read_keys(many, of_torch)
    assert torch.equal(best, of_torch)
