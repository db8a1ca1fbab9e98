"""Logits and settings of rows that are drawn at random, for tests on any device."""

import random
from typing import Any

import torch
from torch import Tensor

from contract.sampling import SamplingParams
from engine.sampling.logits_processors import SamplingRow

TOP_P = (1.0, 0.95, 0.5, 0.1, 1e-9)
KINDS = ("normal", "ties", "flat", "peak", "barred")


def logits_of(kind: str, num_rows: int, size: int) -> Tensor:
    """Return logits of one of KINDS, the same at each call."""
    generator = torch.Generator().manual_seed(size)
    logits = 3 * torch.randn(num_rows, size, generator=generator)
    if kind == "ties":
        logits = logits.round()
    if kind == "flat":
        logits.zero_()
    if kind == "peak":
        logits[:, size // 2] = 60.0
    if kind == "barred":
        logits[torch.rand(logits.shape, generator=generator) < 0.7] = -torch.inf
        logits[:, -1] = 0.0
    return logits


def row_of(rng: random.Random, position: int, **fields: Any) -> SamplingRow:
    """Return a row with random settings; ``fields`` replace some."""
    given = {
        "temperature": rng.choice((0.05, 0.7, 1.0, 2.0)),
        "top_p": rng.choice(TOP_P),
        "top_k": rng.choice((0, 0, 1, 40, 10**6)),
        "min_p": rng.choice((0.0, 0.0, 0.1, 1.0)),
        "seed": rng.randrange(-(2**63), 2**64),
        "max_tokens": 9,
    }
    return SamplingRow(SamplingParams(**{**given, **fields}), (), position, 0)
