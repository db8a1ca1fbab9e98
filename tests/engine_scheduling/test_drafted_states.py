"""Drafts of models with recurrent layers: the answers are those without drafts, and states are rolled back."""

from pathlib import Path
from typing import Any

import pytest
import torch

from contract.requests import EngineRequest
from contract.sampling import SamplingParams
from tests.checkpoints import load_reference, reference_greedy, write_checkpoint
from tests.drafting_engines import Answers, DraftingEngine, without_drafts
from tests.families.tiny_models import make_tiny

MIB = 1 << 20
REPEATING = [5, 6, 7, 8] * 6
PROMPTS = [REPEATING, [3, 1, 4, 1, 5], [*range(40, 60), *range(40, 50)], [9] * 12]
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 4,
    "kv_cache_bytes": 4 * MIB,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "max_model_len": 160,
}
FEW = (5, 6, 7)
"""Tokens of answers that repeat themselves often, and not always."""


def made(folder: Path, family: str) -> Path:
    torch.manual_seed(3)
    return write_checkpoint(folder, make_tiny(family), 3)


def requests(**fields: Any) -> list[EngineRequest]:
    """Return a request for each prompt, greedy and sampled, some with three choices."""
    found = []
    for index, prompt in enumerate(PROMPTS):
        for temperature in (0.0, 1.0):
            sampling = SamplingParams(
                **{
                    "temperature": temperature,
                    "seed": 7 + index,
                    "max_tokens": 40,
                    "ignore_eos": True,
                    "allowed_token_ids": FEW if temperature or index != 1 else (),
                    **fields,
                }
            )
            num_choices = 3 if index == 1 and temperature else 1
            found.append(
                EngineRequest(
                    request_id="", prompt_token_ids=prompt, sampling=sampling, num_choices=num_choices
                )
            )
    return found


def tokens_of(answers: Answers) -> dict[tuple[str, int], Any]:
    return {key: (answer["token_ids"], answer["end"]) for key, answer in answers.items()}


def check_equal(engine: DraftingEngine, other: DraftingEngine, asked: list[EngineRequest]) -> None:
    assert tokens_of(engine.answers(asked)) == tokens_of(other.answers(asked))
    for one in (engine, other):
        one.core.call("check_integrity", [])


@pytest.mark.parametrize(
    "family",
    [
        "lfm2",
        pytest.param("qwen3_5_text", marks=pytest.mark.slow),
        pytest.param("mamba2", marks=pytest.mark.slow),
        pytest.param("jamba", marks=pytest.mark.slow),
        pytest.param("kimi_linear", marks=pytest.mark.slow),
    ],
)
def test_answers_with_drafts_are_those_without(tmp_path: Path, family: str) -> None:
    """Drafts are right, right in part, or wrong; some answers end in the middle of right drafts."""
    model = made(tmp_path, family)
    engine = DraftingEngine(model, num_speculative_tokens=4, **SETTINGS)
    plain = without_drafts(model, **SETTINGS)
    check_equal(engine, plain, requests())
    stats = engine.stats
    assert stats.num_accepted_tokens > 20
    assert stats.num_draft_tokens - stats.num_accepted_tokens > 20
    check_equal(engine, plain, requests(stop_token_ids=(6,), min_tokens=9))
    reference = load_reference(model)
    (free,) = [one for one in requests() if not one.sampling.allowed_token_ids]
    (answer,) = engine.answers([free]).values()
    assert answer["token_ids"] == reference_greedy(reference, PROMPTS[1], 40)
    for one in (engine, plain):
        one.core.close()


@pytest.mark.parametrize("family", ["lfm2", pytest.param("qwen3_5_text", marks=pytest.mark.slow)])
def test_preempted_requests_have_drafts_again(tmp_path: Path, family: str) -> None:
    """Two slots for requests, two for snapshots, one for drafts, and KV for one of the answers."""
    model = made(tmp_path, family)
    plain = without_drafts(model, **SETTINGS)
    config = plain.core.executor.kv_cache_config
    assert config is not None and config.cache.states is not None
    num_bytes = 5 * config.cache.states.slot_bytes + 20 * plain.core.info.layout.block_bytes
    cramped = {**SETTINGS, "state_snapshots": 2, "kv_cache_bytes": num_bytes, "max_model_len": 76}
    engine = DraftingEngine(model, **cramped)
    assert (engine.core.info.num_state_slots, engine.core.info.num_spare_slots) == (5, 1)
    check_equal(engine, plain, requests())
    assert engine.stats.num_accepted_tokens > 0
    assert engine.core.call("counters", [])["num_preemptions_total"] > 0
    for one in (engine, plain):
        one.core.close()
