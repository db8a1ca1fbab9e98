"""Engines on a real model whose layers keep the KV of different tokens, and engines in which each layer keeps all."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from contract.layout import Side
from contract.requests import EngineRequest
from contract.sampling import SamplingParams
from engine.connecting import Transfers
from engine.connector import ConnectorPair
from engine.core import EngineCore
from engine.settings import EngineSettings
from roles.table import STAGES
from tests.checkpoints import make_checkpoint
from tests.drafting_engines import Answers, DraftingEngine, without_drafts
from tests.fakes.engine.transfer import fake_connector_factory

SHARED = [(37 * i + 11) % 256 for i in range(40)]
PROMPTS = [[7], SHARED[:9], SHARED, [*SHARED, *range(60, 81)], [5, 6, 7, 8] * 9]
CRAMPED: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 4,
    "max_num_batched_tokens": 13,
    "max_num_seqs": 4,
    "max_model_len": 120,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first layer sees all tokens, the second one 6."""
    windows: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen2", seed=3, **windows)


def requests(prompts: Sequence[list[int]]) -> list[EngineRequest]:
    """Greedy and drawn answers, of which some have three choices. Of few tokens, so that drafts are often right."""
    return [
        EngineRequest(
            request_id="",
            prompt_token_ids=prompt,
            sampling=SamplingParams(
                temperature=float(index % 2), seed=index, max_tokens=20, allowed_token_ids=(5, 6, 7)
            ),
            num_choices=1 + 2 * (index % 3 == 2),
        )
        for index, prompt in enumerate(prompts)
    ]


def two_turns(engine: DraftingEngine) -> list[Answers]:
    """Return the answers to the prompts, then to each with its answer and more behind it, which finds its prefix."""
    first = engine.answers(requests(PROMPTS))
    second = [[*prompt, *first[str(index), 0]["token_ids"], 1, 2, 3] for index, prompt in enumerate(PROMPTS)]
    answers = [first, engine.answers(requests(second))]
    engine.core.call("check_integrity", [])
    return answers


def windows_of(engine: DraftingEngine) -> list[int | None]:
    return [group.window for group in engine.core.info.groups]


@pytest.mark.parametrize("speculate", ["none", "ngram"])
def test_answers_do_not_depend_on_what_layers_keep(model: Path, speculate: str) -> None:
    """Chunks, choices, preemption, drafts, and a second turn from the cache, with memory for a few requests."""
    roomy = without_drafts(model, dtype="float32", block_size=4, keeps_all_tokens=True)
    assert windows_of(roomy) == []
    expected = two_turns(roomy)
    block_bytes = roomy.core.info.layout.block_bytes
    grouped = DraftingEngine(model, speculate=speculate, kv_cache_bytes=26 * block_bytes, **CRAMPED)
    assert windows_of(grouped) == [None, 6]
    for answers, known in zip(two_turns(grouped), expected, strict=True):
        assert {key: one["token_ids"] for key, one in answers.items()} == {
            key: one["token_ids"] for key, one in known.items()
        }
    counters = grouped.core.call("counters", [])
    assert counters["num_preemptions_total"] > 0
    assert counters["cached_tokens_total"] > 0
    if speculate == "ngram":
        assert grouped.stats.num_accepted_tokens > 0
        assert grouped.stats.num_draft_tokens > grouped.stats.num_accepted_tokens


def test_the_same_memory_holds_longer_texts(model: Path) -> None:
    """One layer of two has a window, so there are nearly twice as many blocks of all tokens."""
    uniform = without_drafts(model, keeps_all_tokens=True, **CRAMPED, kv_cache_bytes=1 << 16)
    grouped = without_drafts(model, **CRAMPED, kv_cache_bytes=1 << 16)
    assert uniform.core.info.num_blocks == (1 << 16) // uniform.core.info.layout.block_bytes == 32
    assert grouped.core.info.num_blocks > 1.5 * uniform.core.info.num_blocks
    assert grouped.core.info.group_blocks[0] == grouped.core.info.num_blocks
    counts = grouped.core.call("debug_state", [])["blocks"]
    assert sum(counts.values()) == sum(grouped.core.info.group_blocks)


def test_a_connector_gets_the_blocks_of_both_groups(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Unless each layer keeps all tokens; the log has the reason."""
    caplog.set_level(logging.INFO, logger="engine.kv_cache.startup")
    settings = EngineSettings(model=model, **CRAMPED, kv_cache_bytes=1 << 20)
    sides = []

    def connect(side: Side, fingerprint: str, wake: Callable[[], None]) -> ConnectorPair:
        sides.append(side)
        return fake_connector_factory(side, fingerprint, wake)

    core = EngineCore(settings, Transfers(connect, STAGES))
    assert [group.window for group in core.info.groups] == [None, 6]
    assert sides == [core.info.side]
    assert sides[0].group_names == ("layers 0: full", "layers 1: window of 6 tokens")
    core.close()
    core = EngineCore(EngineSettings(model=model, **CRAMPED, kv_cache_bytes=1 << 20, keeps_all_tokens=True))
    assert core.info.groups == ()
    assert "all tokens: keeps_all_tokens is set" in caplog.text
    core.close()
    caplog.clear()
    core = EngineCore(settings)
    assert len(core.info.groups) == 2
    assert "KV cache of 1 layers, window of 6 tokens: " in caplog.text
    core.close()
