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
    """For a large vocabulary too, whose weights do not fit into a program's tile."""
    from engine.sampling.triton_draw import draw_by_triton  # a machine without Triton collects this test, too

    rng = random.Random(f"{kind} {size}")
    logits = logits_of(kind, 60, size).to(CUDA)
    rows = [row_of(rng, 5 * place) for place in range(60)]
    places = [place for place in range(60) if place % 5 != 3]
    assert draw_by_triton(logits, rows, places).tolist() == draw_by_torch(logits, rows, places).tolist()
