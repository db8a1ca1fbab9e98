"""Triton's kernels draw the tokens that torch draws: over settings, ties, barred tokens and vocabularies."""

import random

import pytest
import torch

from engine.sampling.sampler import draw_by_torch
from tests.draw_cases import TOP_P, logits_of, row_of

pytestmark = [
    pytest.mark.triton,
    pytest.mark.filterwarnings(
        "ignore:Conversion of an array:DeprecationWarning",
        "ignore:invalid value encountered:RuntimeWarning",
    ),  # raised by the interpreter
]


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("normal", 4097),
        ("ties", 50),
        ("ties", 2500),
        ("flat", 50),
        ("peak", 50),
        ("barred", 50),
        ("normal", 2),
    ],
)
def test_tokens_are_those_of_torch(kind: str, size: int) -> None:
    from engine.sampling import triton_draw

    rng = random.Random(f"{kind} {size}")
    logits = logits_of(kind, 30, size)
    rows = [row_of(rng, 5 * place) for place in range(30)]
    places = [place for place in range(30) if place != 3]
    found = triton_draw.draw_by_triton(logits, rows, places)
    assert len(places) >= triton_draw.LEAST_ROWS
    assert found.tolist() == draw_by_torch(logits, rows, places).tolist()


@pytest.mark.parametrize("top_p", TOP_P)
def test_every_part_of_the_kept_tokens_is_drawn(top_p: float) -> None:
    """Equal scores: the lowest ids are kept, and those in proportion."""
    from engine.sampling import triton_draw

    logits = torch.zeros(48, 20)
    rows = [row_of(random.Random(seed), 0, top_p=top_p, top_k=0, min_p=0.0, seed=seed) for seed in range(48)]
    found = triton_draw.draw_by_triton(logits, rows, range(48)).tolist()
    assert found == draw_by_torch(logits, rows, range(48)).tolist()
    assert max(found) < max(1, round(20 * top_p))
    assert len(set(found)) >= min(5, round(20 * top_p))


def test_a_row_of_nan_ends() -> None:
    from engine.sampling import triton_draw

    logits = logits_of("normal", 25, 50)
    logits[3] = torch.nan
    logits[4, 7] = torch.nan
    rows = [row_of(random.Random(place), place, top_k=0) for place in range(25)]
    found = triton_draw.draw_by_triton(logits, rows, range(25))
    expected = draw_by_torch(logits, rows, range(25))
    assert all(0 <= token < 50 for token in found.tolist())
    whole = [place for place in range(25) if place not in (3, 4)]
    assert found[whole].tolist() == expected[whole].tolist()
