"""Drafts on the kernels: a step with several tokens of a request gives each of them the bits that it has alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from contract.requests import EngineRequest
from contract.sampling import SamplingParams
from engine.kernels.binding import Kernels
from tests.drafting_engines import DraftingEngine, copying_model, without_drafts

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.9, "logprobs": 2},
    {"temperature": 0.6, "frequency_penalty": 0.2},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, kernels: Kernels) -> Path:
    return copying_model(tmp_path_factory.mktemp("model"), torch.bfloat16)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_streams_are_equal(model: Path, caplog: pytest.LogCaptureFixture, num_threads: int) -> None:
    """Law 6 in bfloat16: batches of 1, 4 and 12, so that groups of rows of every size occur."""
    caplog.set_level("INFO")
    engine = DraftingEngine(model, num_threads=num_threads)
    assert any("the kernels compute the model" in record.message for record in caplog.records)
    plain = without_drafts(model, num_threads=num_threads)
    for size in (1, 4, 12):
        requests = [
            EngineRequest(
                request_id="",
                prompt_token_ids=[1, 2, 3, *range(place * 8, place * 8 + 5)],
                sampling=SamplingParams(seed=place, max_tokens=70, **KINDS[place % 4]),
                num_choices=1 + place % 2,
            )
            for place in range(size)
        ]
        before = engine.stats.num_accepted_tokens
        assert engine.answers(requests) == plain.answers(requests)
        assert engine.stats.num_accepted_tokens - before > 20
    engine.core.shutdown()
    plain.core.shutdown()
