"""KV tiers of models whose layers keep the KV of different tokens: of each group only what windows reach comes back."""

from pathlib import Path
from typing import Any

import pytest
import torch

from contract.requests import EngineRequest
from contract.sampling import SamplingParams
from engine.executor import Executor, InProcessExecutor
from engine.kv_tiers.slab import SlabHeader
from engine.settings import EngineSettings
from engine.startup import start_executor
from tests.checkpoints import load_reference, make_checkpoint, make_foreign_checkpoint, reference_greedy
from tests.drafting_engines import DraftingEngine, without_drafts
from tests.engine_scheduling.stepping import SteppedEngine, fake_request
from tests.engine_scheduling.test_window_machine import config_of
from tests.fakes.engine.fakes import fake_answer
from tests.fakes.engine.tiers import FakeTierStorage

NUM_TOKENS = 24
SHARED = [(37 * i + 11) % 256 for i in range(40)]
PROMPTS = [SHARED[:9], SHARED, [*SHARED, *range(60, 81)], [5, 6, 7, 8] * 9, [*SHARED[:24], 3]]
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 4,
    "max_num_batched_tokens": 13,
    "max_num_seqs": 4,
    "max_model_len": 120,
}
POOL_BYTES = 45_000
"""Less than the prompts need at once."""


class Started:
    """An engine whose memory can be spoiled, and how many blocks its tiers have stored, loaded and failed to."""

    def __init__(self, model: Path, **changes: Any) -> None:
        self.executors: list[InProcessExecutor] = []
        self.engine: DraftingEngine = without_drafts(model, start=self._start, **{**SETTINGS, **changes})

    def _start(self, settings: EngineSettings) -> tuple[Executor, int]:
        executor, num_blocks = start_executor(settings)
        assert isinstance(executor, InProcessExecutor)
        self.executors.append(executor)
        return executor, num_blocks

    def answers(self, prompts: list[list[int]]) -> list[list[int]]:
        """Return the greedy answers, asked for at once."""
        sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        asked = [EngineRequest(request_id="", prompt_token_ids=each, sampling=sampling) for each in prompts]
        answers = self.engine.answers(asked)
        self.engine.core.call("check_integrity", [])
        return [answers[str(index), 0]["token_ids"] for index in range(len(prompts))]

    def spoil(self) -> None:
        """Store what is left in the tiers, drop all content of the pools, and fill them with NaN."""
        tiers = self.engine.scheduler.remote_kv.tiers
        assert tiers is not None
        is_stored = False
        while not is_stored:
            for tier in tiers.tiers:
                tier.storage.settle()
            is_stored = not self.engine.core.needs_step()
            if not is_stored:
                self.engine.core.step()
        assert self.engine.scheduler.pools.reset_prefix_cache()
        (executor,) = self.executors
        for region in executor.runner.regions.regions:
            region.pool[1:] = torch.nan

    def count(self, name: str, kind: str) -> int:
        counted = self.engine.core.call("counters", [])[f"kv_tier_{name}{{tier={kind}}}"]
        assert isinstance(counted, int)
        return counted


def make(folder: Path, family: str) -> tuple[Path, list[list[int]], list[list[int]], list[list[int]]]:
    """Return a model, its answers to the prompts, the second turns of these chats, and the answers to them."""
    if family == "mistral":
        model = make_checkpoint(folder, family, seed=3, sliding_window=6)
    else:
        model = make_foreign_checkpoint(folder, family, seed=3)
    reference = load_reference(model)
    first = [reference_greedy(reference, prompt, NUM_TOKENS) for prompt in PROMPTS]
    turns = [[*prompt, *answer, 1, 2, 3] for prompt, answer in zip(PROMPTS, first, strict=True)]
    return model, first, turns, [reference_greedy(reference, turn, NUM_TOKENS) for turn in turns]


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("gemma3", "host"),
        ("mistral", "disk"),
        pytest.param("gpt_oss", "disk", marks=pytest.mark.slow),
        pytest.param("gemma2", "host", marks=pytest.mark.slow),
    ],
)
def test_what_windows_reach_comes_back_from_a_tier(tmp_path: Path, family: str, kind: str) -> None:
    """A17: preempted answers, and a second turn of which the pools have nothing left, are those of ``generate``."""
    model, first, turns, second = make(tmp_path / "model", family)
    tier: dict[str, Any] = {"host_kv_bytes": 1 << 20}
    if kind == "disk":
        tier = {"disk_kv_dir": tmp_path / "kv", "disk_kv_bytes": 1 << 20}
    started = Started(model, kv_cache_bytes=POOL_BYTES, **tier)
    info = started.engine.core.info
    assert info.groups[-1].window is not None
    assert started.answers(PROMPTS) == first
    counted = started.engine.core.call("counters", [])
    if info.groups[0].window is None:  # what a window keeps does not grow, so nothing is preempted for it
        assert counted["num_preemptions_total"] > 0
    assert (
        started.answers(PROMPTS[1:2]) == first[1:2]
    )  # alone, so that nothing of it is lost before it is stored
    started.spoil()
    before = started.count("loaded_blocks_total", kind)
    assert started.answers(turns[1:2]) == second[1:2]
    # The tokens of the first turn but the last one, in whole blocks; of windows those that the next token sees.
    num_blocks = (len(turns[1]) - 4) // 4
    num_loaded = sum(len(group.seen_blocks(4 * num_blocks)) for group in info.groups)
    assert started.count("loaded_blocks_total", kind) - before == num_loaded
    started.spoil()
    assert started.answers(turns) == second
    assert started.count("failed_blocks_total", kind) == 0
    started.engine.core.close()


def test_a_restart_finds_both_groups_on_the_disk_and_computes_what_is_damaged(tmp_path: Path) -> None:
    """A damaged block of either group changes no token."""
    model, first, turns, second = make(tmp_path / "model", "gemma3")
    tier: dict[str, Any] = {"disk_kv_dir": tmp_path / "kv", "disk_kv_bytes": 1 << 20}
    started = Started(model, kv_cache_bytes=POOL_BYTES, **tier)
    assert started.answers(PROMPTS) == first
    started.spoil()
    started.engine.core.close()
    again = Started(model, kv_cache_bytes=POOL_BYTES, **tier)
    assert again.answers(turns[:2]) == second[:2]
    assert again.count("loaded_blocks_total", "disk") > 0
    assert again.count("failed_blocks_total", "disk") == 0
    again.spoil()
    again.engine.core.close()
    for number, folder in enumerate((tmp_path / "kv", tmp_path / "kv" / "group-1")):
        (slab,) = folder.glob("*.slab")
        content = bytearray(slab.read_bytes())
        for place in range(SlabHeader.decode(bytes(content)).first_slot, len(content), 997):
            content[place] ^= 1
        slab.write_bytes(content)
        damaged = Started(model, kv_cache_bytes=POOL_BYTES, **tier)
        assert damaged.answers(turns) == second
        assert damaged.count("failed_blocks_total", "disk") > 0, f"group {number} was not read"
        damaged.engine.core.close()


def faked() -> tuple[SteppedEngine, list[FakeTierStorage]]:
    """Return an engine of two groups of layers, the second with a window of 5 tokens, and their tiers."""
    engine = SteppedEngine(
        with_connector=False, cache=config_of({None: 20, 5: 12}), host_kv_bytes=32, max_model_len=64
    )
    return engine, engine.executor.tiers


def test_what_a_window_has_passed_is_not_stored() -> None:
    """An idle engine has stored all that a next turn needs, and in the same memory that of more texts."""
    engine, (whole, window) = faked()
    engine.add(fake_request("a", [1] * 30, 3))
    engine.run()
    assert len(whole.contents) == 32 // 4
    assert len(window.contents) <= 3, "4 tokens are seen behind each step, and at most a block more is kept"


@pytest.mark.parametrize("group", [0, 1])
def test_behind_a_damaged_block_both_groups_are_computed(group: int) -> None:
    """The blocks of the window would begin behind what must be computed; no token changes, and no block is lost."""
    engine, tiers = faked()
    prompt = [5] * 30
    engine.add(fake_request("first", prompt, 1))
    engine.run()
    assert engine.scheduler.pools.reset_prefix_cache()
    (*_, slot) = tiers[group].contents
    tiers[group].damage(slot)
    engine.add(fake_request("again", prompt, 4))
    engine.run()
    assert engine.tokens("again#0.0") == fake_answer(prompt, 4)
    assert engine.core.call("counters", [])["kv_tier_failed_blocks_total{tier=host}"] == 1
    engine.core.call("check_integrity", [])
    assert engine.scheduler.pools.count_by_state()["held"] == 0
