"""Sampling by the kernels gives the same tokens as torch, for all settings."""

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from contract.sampling import SamplingParams
from engine.compute.forward import forward_pass
from engine.kernels.binding import Kernels
from engine.kernels.decoder import KernelDraw
from engine.models.loading import load
from engine.sampling.logits_processors import SamplingRow
from engine.sampling.sampler import random_by_torch, sample
from engine.settings import EngineSettings
from tests.attention_cases import CPU
from tests.engine_kernels.conftest import MakeCheckpoint

FIELDS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([1e-3, 0.3, 0.8, 1.0, 2.0, 50.0]),
        "top_k": st.sampled_from([0, 1, 2, 16, 17, 50, 600, 5000, 10**6]),
        "top_p": st.sampled_from([1.0, 0.99, 0.95, 0.5, 0.1, 1e-9]),
        "min_p": st.sampled_from([0.0, 0.0, 0.01, 0.5, 1.0]),
        "seed": st.integers(-(2**63), 2**64 - 1),
    }
)


@pytest.fixture(scope="module", params=[1, 3])
def draw(kernels: Kernels, request: pytest.FixtureRequest) -> Iterator[KernelDraw]:
    threads = kernels.start_threads(request.param)
    yield KernelDraw(kernels, threads, request.param)
    kernels.end_threads(threads)


def row(position: int, **fields: Any) -> SamplingRow:
    return SamplingRow(SamplingParams(**fields), (), position, 0)


def random_scores(num_rows: int, size: int, seed: int, scale: float = 3.0) -> Tensor:
    return scale * torch.randn((num_rows, size), generator=torch.Generator().manual_seed(seed))


@settings(max_examples=150, deadline=None)
@given(
    row_fields=st.lists(FIELDS, min_size=1, max_size=5),
    size=st.sampled_from([1, 2, 7, 8, 9, 16, 50, 1000, 2049, 33000]),
    seed=st.integers(0, 2**32),
    step=st.sampled_from([0.0, 0.5, 2.0]),
    num_barred=st.sampled_from([0, 1, 6, 900]),
)
@example(
    row_fields=[{"temperature": 1.0, "top_k": 7, "top_p": 0.5, "min_p": 0.0, "seed": 1}],
    size=50,
    seed=0,
    step=9.0,
    num_barred=0,
)
def test_it_draws_what_torch_draws(
    draw: KernelDraw, row_fields: list[dict[str, Any]], size: int, seed: int, step: float, num_barred: int
) -> None:
    """Scores of every kind: all different, in steps (many equal ones), some masked."""
    scores = random_scores(len(row_fields), size, seed)
    if step:
        scores = (scores / step).round() * step
    scores[:, : min(num_barred, size - 1)] = -torch.inf
    rows = [row(position, **fields) for position, fields in enumerate(row_fields)]
    places = list(range(len(rows)))
    assert draw.random(scores, rows, places).tolist() == random_by_torch(scores, rows, places).tolist()


@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.2])
@pytest.mark.parametrize("top_k", [0, 1, 40, 3000])
def test_a_real_vocabulary(draw: KernelDraw, top_k: int, top_p: float) -> None:
    """All other settings beside each other in one call; only the selected rows are sampled."""
    settings = [(t, p) for t in (0.3, 1.0, 2.0) for p in (0.0, 0.1)]
    rows = [
        row(index, temperature=t, min_p=p, top_k=top_k, top_p=top_p, seed=index)
        for index, (t, p) in enumerate(settings)
    ]
    scores, places = random_scores(len(rows), 151_936, 5), [5, 0, 2, 3]
    assert draw.random(scores, rows, places).tolist() == random_by_torch(scores, rows, places).tolist()


def test_every_token_is_drawn_as_often_as_by_torch(draw: KernelDraw) -> None:
    """Many positions of one flat distribution: Philox, the share of the total and the place are the same."""
    rows = [row(position, temperature=1.0, seed=-3) for position in range(3000)]
    scores = torch.zeros(1, 97).expand(len(rows), 97)
    places = list(range(len(rows)))
    found = draw.random(scores, rows, places).tolist()
    assert found == random_by_torch(scores, rows, places).tolist()
    assert set(found) == set(range(97))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_of_nan_or_infinity_draws_nothing(draw: KernelDraw, bad: float) -> None:
    """It does not affect other rows, and is reported as without kernels."""
    scores = random_scores(3, 1000, 2)
    scores[1] = bad
    rows = [row(i, temperature=1.0, top_k=5, top_p=0.5, seed=i) for i in range(3)]
    found, expected = sample(scores, rows, draw), sample(scores, rows)
    assert (found.token_ids, found.num_nans) == (expected.token_ids, expected.num_nans)
    assert found.token_ids[1] is None


def test_the_draw_of_a_row_does_not_depend_on_the_others(draw: KernelDraw) -> None:
    """Law 6: a row alone samples the same token."""
    scores = random_scores(20, 5000, 8)
    rows = [row(i, temperature=0.7, top_k=30 * (i % 3), top_p=0.9, seed=i) for i in range(20)]
    together = draw.random(scores, rows, list(range(20))).tolist()
    assert [int(draw.random(scores, rows, [i])) for i in range(20)] == together


def test_when_the_kernels_sample(kernels: Kernels, checkpoint: MakeCheckpoint) -> None:
    """On the host the kernels sample, even if torch computes the model, provided that the vocabulary is large."""
    assert kernels is not None
    for overrides, setting, is_by_kernels in (
        ({}, "auto", True),
        ({"intermediate_size": 100}, "auto", False),
        ({"intermediate_size": 100, "vocab_size": 9000}, "auto", True),
        ({"intermediate_size": 100, "vocab_size": 9000}, "torch", False),
    ):
        model = checkpoint("llama", **overrides)
        settings = EngineSettings(model=model, dtype="bfloat16", attention_backend=cast(Any, setting))
        forward = forward_pass(load(model, "bfloat16", None, CPU), settings, CPU)
        assert isinstance(forward.draw, KernelDraw) == is_by_kernels, (overrides, setting)
        forward.close()
