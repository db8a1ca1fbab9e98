"""Engines on a small model that copies, with drafts that are always worth their time, so that tests see many of them."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from contract.outputs import EngineOutput
from contract.requests import EngineRequest
from engine.core import EngineCore
from engine.scheduling.batch.drafting import StepCost
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.stats import SpecDecodingStats
from engine.settings import EngineSettings
from engine.startup import ExecutorStart, start_executor
from tests.checkpoints import VOCAB_SIZE
from tests.copying_checkpoint import make_copying_checkpoint

Answers = dict[tuple[str, int], dict[str, Any]]
"""By request and choice: the tokens and their log probabilities, and how the answer ended."""


class FreeSteps(StepCost):
    """Steps that cost the same with any number of tokens."""

    def note(self, num_tokens: int, seconds: float) -> None:
        """Learn nothing."""


def copying_model(folder: Path, dtype: torch.dtype) -> Path:
    """Write a model whose tokens follow each other in circles of eight; sometimes one is left out."""
    successors = [[token // 8 * 8 + (token + step) % 8 for step in (1, 2)] for token in range(VOCAB_SIZE)]
    return make_copying_checkpoint(
        folder, successors, [[1.0, 0.85]] * VOCAB_SIZE, dtype=dtype, hidden_size=128, head_dim=32
    )


class DraftingEngine:
    """An engine that speculates, driven step by step."""

    def __init__(self, model: Path, start: ExecutorStart = start_executor, **changes: Any) -> None:
        both = {"kv_cache_bytes": 2**22, "speculate": "ngram", **changes}
        self._woken = threading.Semaphore(0)
        self.core = EngineCore(EngineSettings(model=model, **both), wake=self._woken.release, start=start)
        if self.scheduler.batcher.drafting is not None:
            self.scheduler.batcher.drafting.cost = FreeSteps()
        self._num_answers = 0

    @property
    def scheduler(self) -> Scheduler:
        """Its scheduler, with all parts."""
        assert isinstance(self.core.scheduler, Scheduler)
        return self.core.scheduler

    @property
    def stats(self) -> SpecDecodingStats:
        """Its drafts so far."""
        stats = self.scheduler.make_stats().spec_decoding_stats
        assert stats is not None, "this engine does not speculate"
        return stats

    def answers(self, requests: Sequence[EngineRequest]) -> Answers:
        """Answer requests, which get new names, at once."""
        outputs: dict[tuple[str, int], list[EngineOutput]] = {}
        for index, request in enumerate(requests):
            self._num_answers += 1
            name = f"{self._num_answers}-{index}"
            self.core.add_request(msgspec.structs.replace(request, request_id=name))
        while self.scheduler.has_unfinished_requests():
            if not self.core.needs_step():  # a grammar is being compiled
                assert self._woken.acquire(timeout=60)
            for output in self.core.step(may_start_early=lambda: True).get(0, []):
                place = output.request_id.partition("-")[2]
                outputs.setdefault((place, output.choice), []).append(output)
        return {key: _answer_of(own) for key, own in outputs.items()}


def without_drafts(model: Path, **changes: Any) -> DraftingEngine:
    """Return the same engine without speculation."""
    return DraftingEngine(model, **{**changes, "speculate": "none"})


def _answer_of(outputs: list[EngineOutput]) -> dict[str, Any]:
    logprobs = [entry for output in outputs for entry in output.logprobs or ()]
    prompt_logprobs = [entry for output in outputs for entry in output.prompt_logprobs or ()]
    indices = [output.first_index + place for output in outputs for place in range(len(output.token_ids))]
    assert indices == list(range(len(indices))), "each token once, in order"
    end = outputs[-1]
    return {
        "token_ids": [token for output in outputs for token in output.token_ids],
        "logprobs": [(entry.token_id, entry.rank, entry.top_token_ids) for entry in logprobs],
        "values": [round(entry.logprob, 3) for entry in [*logprobs, *prompt_logprobs]],
        "end": (end.finish_reason, end.stop_reason, end.error_message),
    }
