"""`make gpu-check`: tokens that are drawn by Triton are those that torch draws on the same device."""

import random

import pytest
import torch

from engine.sampling.sampler import draw_by_torch
from tests.draw_cases import KINDS, logits_of, row_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("size", [50, 4097, 151_936])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_torch(kind: str, size: int) -> None:
    """For a large vocabulary too, and with greedy rows among the others."""
    from engine.sampling.triton_draw import draw_by_triton  # a machine without Triton collects this test, too

    rng = random.Random(f"{kind} {size}")
    logits = logits_of(kind, 48, size).to(CUDA)
    rows = [row_of(rng, 5 * place) for place in range(44)]
    rows += [row_of(rng, place, temperature=0.0) for place in range(4)]
    assert draw_by_triton(logits, rows).tolist() == draw_by_torch(logits, rows).tolist()


@pytest.mark.parametrize("num_rows", [1, 3, 16, 256])
@pytest.mark.parametrize("deviation", [0.8, 3.0])
def test_logits_of_a_model(num_rows: int, deviation: float) -> None:
    """In bfloat16, with top-p and without: the edge is among many equal tokens."""
    from engine.sampling.triton_draw import draw_by_triton

    generator = torch.Generator().manual_seed(num_rows)
    logits = (deviation * torch.randn(num_rows, 128_256, generator=generator)).to(torch.bfloat16).to(CUDA)
    for top_p in (0.95, 0.5, 1.0):
        rows = [
            row_of(random.Random(i), i, temperature=0.8, top_p=top_p, top_k=0, min_p=0.0)
            for i in range(num_rows)
        ]
        assert draw_by_triton(logits, rows).tolist() == draw_by_torch(logits, rows).tolist()
