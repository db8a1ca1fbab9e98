"""Drafts in an engine of two ranks: both keep the same tokens, and the answers are those without drafts."""

from pathlib import Path
from typing import Any

import pytest
import torch

from contract.requests import EngineRequest
from engine.executor import Executor
from engine.kv_cache.startup import initialize_kv_cache
from engine.settings import EngineSettings
from engine.startup import ExecutorStart, start_executor
from tests.drafting_engines import DraftingEngine, copying_model, without_drafts
from tests.engine_speculation.test_streams import KINDS, request
from tests.fakes.engine.local_ranks import LocalRanksExecutor

pytestmark = pytest.mark.timeout(300)
"""Each of several processes loads torch, perhaps while other tests run."""


def ranks_as_threads(settings: EngineSettings) -> tuple[Executor, int]:
    ranks = LocalRanksExecutor(settings)
    return ranks, initialize_kv_cache(ranks)[0]


def requests() -> list[EngineRequest]:
    """Requests of all kinds, with drafts that are right, wrong and right in part; each rank has the logits of some."""
    return [request("", kind, first, 12, 40, 1) for kind in sorted(KINDS) for first in (104, 200)]


@pytest.mark.parametrize(
    "start", [ranks_as_threads, pytest.param(start_executor, marks=pytest.mark.slow)], ids=["threads", "gloo"]
)
def test_ranks_with_drafts_give_the_answers_without(tmp_path: Path, start: ExecutorStart) -> None:
    """B3, D1, law 6: rank 0 draws and shares the tokens; each rank finds the drafts that are equal."""
    torch.set_num_threads(1)
    model = copying_model(tmp_path, torch.float32)
    two: dict[str, Any] = {"start": start, "tensor_parallel_size": 2}
    plain, drafting = without_drafts(model, **two), DraftingEngine(model, **two)
    try:
        for _ in range(2):  # the second time, prompts are found in the prefix cache
            assert drafting.answers(requests()) == plain.answers(requests())
        stats = drafting.stats
        assert 10 < stats.num_accepted_tokens < stats.num_draft_tokens
    finally:
        plain.core.close()
        drafting.core.close()
