"""KV tiers of models with recurrent layers: a preempted request gets its states back with all that they have absorbed."""

from pathlib import Path
from typing import Any

import pytest

from contract.requests import EngineRequest
from contract.sampling import SamplingParams
from engine.executor import Executor, InProcessExecutor
from engine.kv_tiers.host import HostTier
from engine.settings import EngineSettings
from engine.startup import start_executor
from tests.checkpoints import load_reference, reference_greedy, write_checkpoint
from tests.drafting_engines import DraftingEngine, without_drafts
from tests.engine_scheduling.stepping import SteppedEngine, fake_request
from tests.engine_scheduling.test_real_states import (
    CRAMPED,
    MIB,
    NUM_TOKENS,
    PROMPTS,
    bytes_for,
    check_answers,
)
from tests.engine_scheduling.test_state_slots import config_of
from tests.fakes.engine.fakes import fake_answer
from tests.families.tiny_models import make_tiny


class Spoiling(InProcessExecutor):
    """Fills slots that no request has with NaN before each step, and forgets what they have absorbed.

    damages: what a tier has of states is damaged, too.
    """

    engine: DraftingEngine | None = None
    damages = False

    def begin(self, scheduled: Any) -> Any:
        """See Executor."""
        states = self.runner.regions.states
        if self.engine is not None and states is not None:
            slots = self.engine.scheduler.pools.states
            assert slots is not None
            kept = {slot for pair in scheduled.block_copies[-1:] for copy in pair for slot in copy}
            for slot in set(slots._free) - kept:
                states._slots[slot - 1].fill_(255)
                states._num_tokens[slot] = -1
        if self.damages:
            host = self._tiers[-1]
            assert isinstance(host, HostTier)
            host.slot_view(0)[:] = bytes(host.slot_bytes)
        return super().begin(scheduled)


def started(folder: Path, **changes: Any) -> DraftingEngine:
    """Return an engine with two slots, and KV for little more than one text, so that requests are preempted."""
    executors: list[Spoiling] = []

    def start(settings: EngineSettings) -> tuple[Executor, int]:
        executor, num_blocks = start_executor(settings)
        assert isinstance(executor, InProcessExecutor)
        executor.__class__ = Spoiling
        assert isinstance(executor, Spoiling)
        executors.append(executor)
        return executor, num_blocks

    roomy = without_drafts(folder, kv_cache_bytes=4 * MIB, **CRAMPED)
    num_bytes = bytes_for(roomy.core, 1.1)
    roomy.core.close()
    engine = without_drafts(folder, start=start, kv_cache_bytes=num_bytes, **CRAMPED, **changes)
    executors[0].engine = engine
    return engine


def count(engine: DraftingEngine, name: str, kind: str) -> float:
    counted = engine.core.call("counters", [])[f"kv_tier_{name}{{tier={kind}}}"]
    assert isinstance(counted, int | float)
    return counted


@pytest.mark.parametrize(
    ("family", "kind"), [("lfm2", "host"), pytest.param("qwen3_5_text", "disk", marks=pytest.mark.slow)]
)
def test_a_preempted_request_continues_behind_its_last_token(tmp_path: Path, family: str, kind: str) -> None:
    """A16, A17: the tokens are those of ``generate``. Free slots have NaN."""
    folder = write_checkpoint(tmp_path / "model", make_tiny(family), 3)
    tier: dict[str, Any] = {"host_kv_bytes": 4 * MIB}
    if kind == "disk":
        tier = {"disk_kv_dir": tmp_path / "kv", "disk_kv_bytes": 4 * MIB}
    engine = started(folder, **tier)
    reference = load_reference(folder)
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompts = PROMPTS * 2
    asked = [EngineRequest(request_id="", prompt_token_ids=each, sampling=sampling) for each in prompts]
    answers = engine.answers(asked)
    engine.core.call("check_integrity", [])
    for index, prompt in enumerate(prompts):
        assert answers[str(index), 0]["token_ids"] == reference_greedy(reference, prompt, NUM_TOKENS)
    counters = engine.core.call("counters", [])
    assert counters["num_preemptions_total"] > 0
    assert count(engine, "loaded_blocks_total", kind) > 0
    assert count(engine, "failed_blocks_total", kind) == 0
    check_answers(engine, folder)  # with choices, which copy the states of their prompt
    engine.core.close()


def test_nothing_is_computed_twice() -> None:
    """A16, A17: its full blocks, the partly filled one and its states come back, and each token was computed once."""
    engine = SteppedEngine(
        with_connector=False, cache=config_of(8, 4), host_kv_bytes=32, max_model_len=24, max_num_seqs=4
    )
    prompts = {"a": [1] * 6, "b": [2] * 6}
    engine.add(*(fake_request(name, prompt, 16) for name, prompt in prompts.items()))
    while not engine.scheduler.queues.waiting.requests or not engine.scheduler.totals.num_preemptions:
        engine.step()
    assert engine.scheduler.make_stats().num_swapped_reqs == 1
    engine.run()
    for name, prompt in prompts.items():
        assert engine.tokens(f"{name}#0.0") == fake_answer(prompt, 16)
    assert sum(engine.executor.runner.batch_sizes) == 2 * (6 + 15)
    assert [len(tier.loads) for tier in engine.executor.tiers] == [1, 1]
    engine.core.call("check_integrity", [])


def test_damaged_states_are_computed_again(tmp_path: Path) -> None:
    """Law 3: no answer continues from them, and no other one notices."""
    folder = write_checkpoint(tmp_path / "model", make_tiny("lfm2"), 3)
    engine = started(folder, host_kv_bytes=4 * MIB)
    executor = engine.core.executor
    assert isinstance(executor, Spoiling)
    executor.damages = True
    check_answers(engine, folder, PROMPTS * 2)
    assert count(engine, "failed_blocks_total", "host") > 0
    engine.core.close()
