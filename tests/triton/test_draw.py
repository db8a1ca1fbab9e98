"""Triton's kernels draw the tokens that torch draws: over settings, ties, barred tokens and vocabularies."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.sampling.logits_processors import SamplingRow
from engine.sampling.sampler import draw_by_torch, sample
from tests.draw_cases import TOP_P, logits_of, row_of

pytestmark = [
    pytest.mark.triton,
    pytest.mark.filterwarnings(
        "ignore:Conversion of an array:DeprecationWarning",
        "ignore:invalid value encountered:RuntimeWarning",
        "ignore:overflow encountered:RuntimeWarning",
        "ignore:divide by zero encountered:RuntimeWarning",
    ),  # raised by the interpreter
]


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("normal", 4097),
        ("ties", 50),
        ("ties", 2500),
        ("flat", 50),
        ("flat", 5000),
        ("peak", 50),
        ("barred", 50),
        ("normal", 2),
    ],
)
def test_tokens_are_those_of_torch(kind: str, size: int) -> None:
    """Greedy rows are among the others."""
    from engine.sampling import triton_draw

    rng = random.Random(f"{kind} {size}")
    logits = logits_of(kind, 12, size)
    rows = [row_of(rng, 5 * place) for place in range(10)]
    rows += [row_of(rng, place, temperature=0.0) for place in range(2)]
    found = triton_draw.draw_by_triton(logits, rows)
    assert found.tolist() == draw_by_torch(logits, rows).tolist()


@pytest.mark.parametrize("num_rows", [1, 5, 17])
def test_numbers_of_rows_are_divided_differently(num_rows: int) -> None:
    """The tokens are the same, in bfloat16 as in float32, and in rows with gaps between them."""
    from engine.sampling import triton_draw

    rng = random.Random(num_rows)
    logits = logits_of("normal", 2 * num_rows, 6000)[::2].to(torch.bfloat16)
    rows = [row_of(rng, place) for place in range(num_rows)]
    found = triton_draw.draw_by_triton(logits, rows).tolist()
    assert found == draw_by_torch(logits.to(torch.float32), rows).tolist()


def test_many_rows_of_an_odd_vocabulary() -> None:
    """Each row has settings of its own, and the scores have ties. On a device there are 256 such rows."""
    from engine.sampling import triton_draw

    rng = random.Random(5)
    logits = logits_of("ties", 48, 333)
    rows = [row_of(rng, place) for place in range(48)]
    found = triton_draw.draw_by_triton(logits, rows)
    assert found.tolist() == draw_by_torch(logits, rows).tolist()


def test_a_whole_step_draws_what_it_draws_by_torch() -> None:
    """With masks, biases, penalties, log probabilities, greedy rows and a row of NaN in one step."""
    from engine.sampling import triton_draw

    tokens = np.array([3, 3, 900, 7], dtype=np.int32)
    settings: list[dict[str, Any]] = [
        {},
        {"logprobs": 2},
        {"temperature": 0.0, "logprobs": 0},
        {"allowed_token_ids": [5, 900, 901]},
        {"logit_bias": ((17, 50.0), (3, -100.0))},
        {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.3},
        {"top_k": 3, "logprobs": 1},
        {"min_p": 0.2},
    ]
    rows = []
    for place, fields in enumerate(settings):
        plain = {"temperature": 0.8, "top_p": 0.9, "top_k": 0, "min_p": 0.0, **fields}
        row = row_of(random.Random(place), place, **plain)
        rows.append(replace(row, prompt_tokens=tokens[:2], answer_tokens=tokens[2:]))
    rows[0] = replace(rows[0], bitmask=np.full(-(-1001 // 32), 0x0F0F, dtype=np.int32))
    logits = logits_of("normal", len(rows), 1001)
    logits[7, 30] = torch.nan
    found = sample(logits, rows, triton_draw.draw_by_triton)
    assert found == sample(logits, rows)
    assert found.token_ids[7] is None
    assert found.token_ids[4] == 17


@pytest.mark.parametrize("top_p", TOP_P)
def test_every_part_of_the_kept_tokens_is_drawn(top_p: float) -> None:
    """Equal scores: the lowest ids are kept, and those in proportion."""
    from engine.sampling import triton_draw

    logits = torch.zeros(48, 20)
    rows = [row_of(random.Random(seed), 0, top_p=top_p, top_k=0, min_p=0.0, seed=seed) for seed in range(48)]
    found = triton_draw.draw_by_triton(logits, rows)
    assert found.tolist() == draw_by_torch(logits, rows).tolist()
    tokens = found[0].tolist()
    assert max(tokens) < max(1, round(20 * top_p))
    assert len(set(tokens)) >= min(5, round(20 * top_p))


def modes_of(logits: Tensor, rows: list[SamplingRow]) -> list[int]:
    """Return how each row is drawn, after its token was compared with torch's."""
    from engine.sampling import triton_draw

    settings = triton_draw.settings_of(rows)
    is_bounded = triton_draw.has_bounds(settings, logits.shape[1])
    launched = triton_draw.launch(logits, torch.from_numpy(settings), is_bounded)
    assert launched.tokens.tolist() == draw_by_torch(logits, rows).tolist()
    return launched.modes[:, 0].tolist()


@pytest.mark.parametrize(("deviation", "outstanding"), [(0.8, 0.0), (3.0, 0.0), (2.2, 8.0)])
def test_the_edge_is_in_the_range_that_is_estimated(deviation: float, outstanding: float) -> None:
    """No row of usual logits is searched: nearly equal tokens, a few good ones, and outstanding ones above many."""
    from engine.sampling.triton_weights import SUMMED

    generator = torch.Generator().manual_seed(5)
    logits = deviation * torch.randn(2, 40_000, generator=generator)
    logits[:, :40] += outstanding
    for temperature, top_p in ((0.1, 0.5), (0.8, 0.95), (1.0, 0.999), (2.0, 0.99)):
        rows = [
            row_of(random.Random(), i, temperature=temperature, top_p=top_p, top_k=0, min_p=0.0)
            for i in (1, 2)
        ]
        assert modes_of(logits.to(torch.bfloat16).to(torch.float32), rows) == [SUMMED.value] * 2


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.5), (4500, 0.5), (4500, 1.0)])
def test_a_row_that_cannot_be_listed_is_searched(top_k: int, top_p: float) -> None:
    """Many equal scores, and a top-k beyond what can be listed."""
    from engine.sampling.triton_weights import SEARCHED

    logits = logits_of("ties", 2, 9000)
    logits[1] = 0.0
    rows = [row_of(random.Random(i), i, temperature=0.7, top_k=top_k, top_p=top_p, min_p=0.0) for i in (1, 2)]
    assert SEARCHED.value in modes_of(logits, rows)


def test_a_row_of_nan_ends() -> None:
    """It draws any token, is marked, and changes no other row."""
    from engine.sampling import triton_draw

    logits = logits_of("normal", 8, 50)
    logits[3] = torch.nan
    logits[4, 7] = torch.nan
    logits[5] = -torch.inf
    logits[6, 9] = torch.inf
    rows = [row_of(random.Random(place), place, top_k=0) for place in range(8)]
    tokens, is_number = triton_draw.draw_by_triton(logits, rows).tolist()
    expected, is_expected = draw_by_torch(logits, rows).tolist()
    assert is_number == is_expected == [1, 1, 1, 0, 0, 0, 0, 1]
    assert all(0 <= token < 50 for token in tokens)
    for place in (0, 1, 2, 7):
        assert tokens[place] == expected[place]
