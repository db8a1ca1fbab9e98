"""The scheduler over several groups of layers, under any order of events: see ``test_state_machine``.

The FakeRunner checks in each group that all slots that a window reaches hold the right KV, and writes each token's.
"""

from typing import Any, ClassVar

import pytest
from hypothesis.stateful import invariant

from contract.cache_layout import CacheLayout
from contract.layout import KVLayout
from engine.kv_cache.startup import KVCacheConfig
from engine.scheduling.blocks.block_pool import NULL_BLOCK
from engine.scheduling.requests.finish import RequestStatus
from tests.engine_scheduling.stepping import SEND, SteppedEngine, fake_request
from tests.engine_scheduling.test_state_machine import MachineOfLeavingReceivers, SchedulerMachine
from tests.engine_scheduling.test_state_slots import STATES
from tests.fakes.engine.fakes import fake_answer
from tests.soak_settings import machine_test

SIZE = 4


def config_of(num_blocks: dict[int | None, int], num_slots: int = 0) -> KVCacheConfig:
    """Return an allocation of a layer with each of these windows, with so many blocks. num_slots: for states; 0: none."""
    layout = KVLayout(
        num_layers=len(num_blocks), num_kv_heads=1, head_dim=1, block_size=SIZE, dtype="float32"
    )
    cache = CacheLayout.of(layout, list(num_blocks), STATES if num_slots else None)
    return KVCacheConfig(tuple(num_blocks[group.window] for group in cache.groups), cache, num_slots)


class MachineOfWindows(SchedulerMachine):
    """The group with a window has few blocks, so that it runs short before the other one."""

    has_connector = False
    cache = config_of({None: 14, 5: 7})

    @invariant()
    def nothing_is_kept_that_no_window_reaches(self) -> None:
        pools = self.engine.scheduler.pools
        for request in self.engine.scheduler.requests.values():
            if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                continue
            for group, pool in zip(pools.groups, pools.pools, strict=True):
                table = pool.table_of(request.key)
                num_passed = group.num_passed_blocks(request.num_computed_tokens)
                assert table.count(NULL_BLOCK) == num_passed or not table


TestWindows = machine_test(MachineOfWindows, 60, 50)


class MachineOfLentWindows(MachineOfWindows):
    """Prompts are lent and received, and answers handed off, in both groups; a lent prompt is never short of a block."""

    has_connector = True


TestLentWindows = machine_test(MachineOfLentWindows, 60, 50)


class MachineOfLentWindowsAlone(MachineOfLentWindows):
    """No layer keeps all tokens, so nothing is lent before the end of a prompt."""

    cache = config_of({9: 11, 3: 8})


TestLentWindowsAlone = machine_test(MachineOfLentWindowsAlone, 40, 50)


class MachineOfStatesAndWindows(MachineOfLeavingReceivers, MachineOfLentWindows):
    """A slot beside the blocks of both groups, and snapshots of what is in it: a request has all of them, or nothing."""

    cache = config_of({None: 14, 5: 7}, 5)
    changes: ClassVar[dict[str, Any]] = {"state_snapshots": 2}


TestStatesAndWindows = machine_test(MachineOfStatesAndWindows, 40, 50)


class MachineOfDraftsInWindows(MachineOfWindows):
    """No layer keeps all tokens. Drafts are computed, of which some are wrong; steps run ahead where there are none."""

    runs_ahead = True
    cache = config_of({9: 11, 3: 8})
    changes: ClassVar[dict[str, Any]] = {"speculate": "ngram", "num_speculative_tokens": 3}


TestDraftsInWindows = machine_test(MachineOfDraftsInWindows, 60, 50)


def engine_of(num_blocks: dict[int | None, int], **changes: Any) -> SteppedEngine:
    return SteppedEngine(with_connector=False, cache=config_of(num_blocks), **changes)


def test_a_text_may_be_longer_than_the_blocks_of_its_window() -> None:
    """60 tokens by chunks of 6, in 4 blocks of a window of 5: what is passed is free for what follows."""
    prompt = [token % 7 for token in range(50)]
    engine = engine_of({5: 5}, max_num_batched_tokens=6)
    engine.add(fake_request("a", prompt, max_tokens=10))
    engine.run()
    assert engine.tokens("a#0.0") == fake_answer(prompt, 10)
    assert engine.core.info.max_model_len == 256
    assert engine.scheduler.totals.num_preemptions == 0


def test_a_second_turn_finds_its_prefix_by_the_last_blocks_of_a_window() -> None:
    """Both groups have what the first new token sees; the window's group has lost all before."""
    prompt = [token % 7 for token in range(41)]
    engine = engine_of({None: 40, 5: 8}, max_num_batched_tokens=12)
    engine.add(fake_request("a", prompt, max_tokens=4))
    engine.run()
    turn = [*prompt, *engine.tokens("a#0.0"), 1, 2, 3]
    engine.add(fake_request("b", turn, max_tokens=4))
    engine.run()
    assert engine.outputs["b#0.0"][0].num_cached_tokens == 44
    assert engine.tokens("b#0.0") == fake_answer(turn, 4)
    # Of the first turn's own prompt the window's blocks are another's by now: it is computed again, from the start.
    engine.add(fake_request("c", prompt[:20], max_tokens=1))
    engine.run()
    assert engine.outputs["c#0.0"][0].num_cached_tokens == 0
    assert engine.tokens("c#0.0") == fake_answer(prompt[:20], 1)


@pytest.mark.parametrize("num_tokens", [8, 10])
def test_choices_continue_a_prompt_in_each_group(num_tokens: int) -> None:
    """Full blocks are shared, with those that were freed; the last one is copied in each group."""
    prompt = [token % 5 for token in range(num_tokens)]
    engine = engine_of({None: 40, 5: 30})
    engine.add(fake_request("a", prompt, max_tokens=9, num_choices=3))
    engine.step()
    pools = engine.scheduler.pools
    tables = [pools.tables_of(f"a#{choice}.0") for choice in range(3)]
    num_full = num_tokens // SIZE
    for index, group in enumerate(pools.groups):
        shared = [table[index][:num_full] for table in tables]
        assert shared[0] == shared[1] == shared[2]
        assert shared[0].count(NULL_BLOCK) == group.num_passed_blocks(num_tokens)
        own = [block for table in tables for block in table[index][num_full:]]
        assert len(set(own)) == len(own)
    engine.run()
    for choice in range(3):
        assert engine.tokens(f"a#{choice}.0") == fake_answer(prompt, 9, choice)


def test_a_wait_for_blocks_of_a_window_ends() -> None:
    """Blocks of all tokens are plenty; the second prompt starts when the first has left its window's."""
    engine = engine_of({None: 60, 5: 7}, max_num_batched_tokens=8)
    prompts = {"a": [1] * 30, "b": [2] * 30}
    for name, prompt in prompts.items():
        engine.add(fake_request(name, prompt, max_tokens=6))
    engine.step()
    assert engine.request_counts() == (1, 1)
    engine.run()
    for name, prompt in prompts.items():
        assert engine.tokens(f"{name}#0.0") == fake_answer(prompt, 6)


def test_a_lent_prompt_is_never_short_of_a_block() -> None:
    """Law 4: it holds a window and a chunk, and what it leaves is its own again, while answers take all that is free."""
    prompt = [token % 7 for token in range(40)]
    cache = config_of({None: 60, 5: 9})
    engine = SteppedEngine(cache=cache, max_num_batched_tokens=6, max_num_seqs=4)
    for name in ("x", "y"):
        engine.add(fake_request(name, [1, 2, 3], max_tokens=30))
    engine.step()
    engine.add(fake_request("a", prompt, transfer=SEND))
    pools = engine.scheduler.pools
    while "a#0.0" in engine.scheduler.requests:
        engine.step()
        engine.core.call("check_integrity", [])
        assert pools.pools[1].holders().get("a#0.0", 0) <= pools.groups[1].max_blocks(40, 6)
    assert engine.connector.sends["a#0.0"].num_published == 40
    assert len(engine.connector.sends["a#0.0"].last[0]) == len(pools.groups[1].seen_blocks(40)) == 1
    assert engine.tokens("a#0.0") == fake_answer(prompt, 1)
    engine.connector.end_lease("a#0.0")
    engine.run()
    assert engine.tokens("x#0.0") == fake_answer([1, 2, 3], 30)
    assert pools.usage == 0.0


def test_a_lent_prompt_that_is_aborted_has_shorter_tables_in_windows() -> None:
    """It was not computed to its end: its lease has all blocks of the first group, and a part of the others'."""
    cache = config_of({None: 60, 5: 9})
    engine = SteppedEngine(cache=cache, max_num_batched_tokens=6)
    engine.add(fake_request("a", [token % 7 for token in range(40)], transfer=SEND))
    engine.step()
    engine.core.abort(["a#0.0"])
    pools = engine.scheduler.pools
    assert [pool.num_blocks_of("lease:a#0.0") for pool in pools.pools] == [10, 2]
    engine.core.call("check_integrity", [])
    engine.connector.end_lease("a#0.0")
    engine.run()
    assert pools.usage == 0.0
    engine.core.call("check_integrity", [])
