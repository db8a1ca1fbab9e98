"""Answers are the same with and without drafts: tokens, log probabilities and ends, whatever a request asks for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.requests import EngineRequest
from contract.sampling import Grammar, SamplingParams
from engine.scheduling.inspection import check_integrity
from tests.checkpoints import EOS_ID
from tests.drafting_engines import Answers, DraftingEngine, copying_model, without_drafts

GRAMMARS = {
    "regex": Grammar("regex", "([h-o]{3}-){2,9}"),
    "choice": Grammar("choice", json.dumps(["hijklmno" * 5, "hijk, hijk, hijk, hijk"])),
    "schema": Grammar(
        "json_schema", json.dumps({"type": "array", "items": {"enum": ["hi", "hij"]}, "minItems": 6})
    ),
}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0},
    "wild": {"temperature": 1.7, "top_p": 0.95, "top_k": 50},
    "penalties": {
        "temperature": 0.7,
        "repetition_penalty": 1.05,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.1,
    },
    "logprobs": {"temperature": 0.0, "logprobs": 3},
    "seeded logprobs": {"temperature": 1.0, "logprobs": 0, "prompt_logprobs": 1},
    "stop tokens": {"temperature": 1.0, "stop_token_ids": (104, 10), "min_tokens": 5},
    "biased": {"temperature": 0.0, "logit_bias": ((106, 4.0), (107, -100.0))},
    "few tokens": {"temperature": 0.5, "allowed_token_ids": tuple(range(100, 110))},
    **{name: {"temperature": 0.5, "grammar": grammar} for name, grammar in GRAMMARS.items()},
}


def request(
    name: str, kind: str, first: int, length: int, max_tokens: int, num_choices: int
) -> EngineRequest:
    """A prompt walks through one of the model's circles, more than once if it is long."""
    prompt = [1, 2, 3] + [first // 8 * 8 + (first + place) % 8 for place in range(length)]
    sampling = SamplingParams(seed=first * 31 + length, max_tokens=max_tokens, **KINDS[kind])
    return EngineRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=sampling,
        num_choices=num_choices,
        eos_token_ids=(EOS_ID,),
    )


REQUESTS = st.lists(
    st.builds(
        request,
        name=st.just(""),
        kind=st.sampled_from(sorted(KINDS)),
        first=st.integers(0, 200),
        length=st.integers(1, 30),
        max_tokens=st.integers(1, 50),
        num_choices=st.sampled_from([1, 1, 1, 3]),
    ),
    min_size=1,
    max_size=4,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return copying_model(tmp_path_factory.mktemp("model"), torch.float32)


@pytest.fixture(scope="module")
def engines(model: Path) -> list[DraftingEngine]:
    """A roomy engine, and one in which requests wait for each other and are preempted, whose steps are cut short."""
    cramped: dict[str, Any] = {
        "kv_cache_bytes": 2**17,
        "max_num_batched_tokens": 20,
        "max_num_seqs": 3,
        "max_model_len": 96,
    }
    return [
        DraftingEngine(model, max_model_len=96),
        DraftingEngine(model, num_speculative_tokens=4, **cramped),
    ]


@pytest.fixture(scope="module")
def plain(model: Path) -> Any:
    return without_drafts(model, max_model_len=96)


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(requests=REQUESTS)
def test_streams_are_equal(plain: Any, engines: list[DraftingEngine], requests: list[EngineRequest]) -> None:
    """B3, law 6: the same sampling in every place, with the same numbers drawn."""
    expected: Answers = plain.answers(requests)
    for engine in engines:
        assert engine.answers(requests) == expected
        check_integrity(engine.scheduler)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_each_kind_of_request_has_right_drafts(plain: Any, engines: list[DraftingEngine], kind: str) -> None:
    """Otherwise the property above would not test it."""
    requests = [request(kind, kind, first, 20, 60, 1) for first in (104, 16)]
    before = engines[0].stats.num_accepted_tokens
    assert engines[0].answers(requests) == plain.answers(requests)
    assert engines[0].stats.num_accepted_tokens - before > 3


def test_preempted_requests_had_drafts_too(plain: Any, engines: list[DraftingEngine]) -> None:
    cramped = engines[1]
    before = cramped.scheduler.totals.num_preemptions, cramped.stats.num_accepted_tokens
    requests = [request("r", "seeded", first, 12, 50, 1) for first in (8, 80, 160)]
    assert cramped.answers(requests) == plain.answers(requests)
    assert cramped.scheduler.totals.num_preemptions > before[0]
    assert cramped.stats.num_accepted_tokens > before[1]


def test_a_copied_passage_takes_a_fifth_of_the_steps(engines: list[DraftingEngine]) -> None:
    engine = engines[0]
    before = engine.scheduler.totals.num_steps
    engine.answers([request("r", "greedy", 40, 20, 60, 1)])
    assert engine.scheduler.totals.num_steps - before <= 12
