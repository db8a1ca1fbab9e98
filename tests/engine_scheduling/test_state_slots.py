"""Slots for the states of recurrent layers: one of each request, which nothing else reads or writes.

The FakeRunner checks at each step that a slot has absorbed exactly the tokens before it (the state rule).
"""

from typing import Any, ClassVar

import msgspec
import pytest

from contract.block_hash import BlockHash
from contract.cache_layout import CacheLayout
from contract.layout import KVLayout
from contract.requests import choice_key
from contract.state_layout import StateLayout, StatePart
from engine.kv_cache.startup import KVCacheConfig
from engine.scheduling.blocks.block_pool import BlockPool
from engine.scheduling.blocks.cache_pools import CachePools
from engine.scheduling.blocks.state_slots import StateSlots
from engine.scheduling.blocks.state_snapshots import StateSnapshots
from tests.engine_scheduling.stepping import SteppedEngine, fake_request
from tests.engine_scheduling.test_drafts import RecordedEngine
from tests.engine_scheduling.test_state_machine import MachineOfLeavingReceivers, MachineOfWholePrompts
from tests.fakes.engine.fakes import NAN_TOKEN, fake_answer
from tests.soak_settings import machine_test

SIZE = 4
STATES = StateLayout((StatePart(layer=0, name="recurrent", shape=(2,), dtype="float32"),))


def config_of(num_blocks: int, num_slots: int, num_layers: int = 1, num_spares: int = 0) -> KVCacheConfig:
    """Return an allocation of layers that keep all tokens, and of slots, those for snapshots and drafts included."""
    layout = KVLayout(num_layers=num_layers, num_kv_heads=1, head_dim=1, block_size=SIZE, dtype="float32")
    cache = CacheLayout.of(layout, [None] * num_layers, STATES)
    return KVCacheConfig((num_blocks,), cache, num_slots, num_spares)


def engine_of(
    num_blocks: int, num_slots: int, *, with_connector: bool = False, **changes: Any
) -> SteppedEngine:
    small = {"max_num_seqs": 4, "max_num_batched_tokens": 32, **changes}
    return SteppedEngine(with_connector=with_connector, cache=config_of(num_blocks, num_slots), **small)


class MachineOfStates(MachineOfLeavingReceivers):
    """Fewer slots than places, so that requests wait for one."""

    cache = config_of(14, 2)


TestStates = machine_test(MachineOfStates, 30, 40)


class MachineOfManySlots(MachineOfStates):
    """Blocks run short before slots, so that requests are preempted."""

    cache = config_of(14, 9)
    batching: ClassVar[dict[str, Any]] = {"max_num_batched_tokens": 12}


TestManySlots = machine_test(MachineOfManySlots, 30, 40)


class MachineOfStatesAndWholePrompts(MachineOfStates, MachineOfWholePrompts):
    """Steps of prompts and of answers take turns; states let none run ahead."""

    runs_ahead = False


TestStatesAndWholePrompts = machine_test(MachineOfStatesAndWholePrompts, 30, 40)


def test_a_slot_has_one_owner() -> None:
    slots = StateSlots(2)
    assert slots.allocate("a") == [1]
    assert slots.allocate("a") == []
    assert slots.table_of("a") == [1]
    assert slots.table_of("b") == []
    assert slots.allocate("b") == [2]
    assert (slots.num_free, slots.usage) == (0, 1.0)
    slots.fork("a", "b")
    assert slots.pop_copies() == [(1, 2)]
    assert slots.pop_copies() == []
    slots.free("a")
    slots.free("a")
    assert (slots.num_free, slots.holders()) == (1, {"b"})
    slots.check_integrity()


def test_a_request_has_blocks_and_a_slot_or_neither() -> None:
    """A free slot is needed to start, and not to go on."""
    config = config_of(9, 1)
    pools = CachePools(config.cache.groups, [BlockPool(9, SIZE)], 8, StateSlots(1))
    assert pools.empty() == ([], [])
    assert pools.can_hold(2)
    assert pools.allocate("a", 2) == ([1, 2], [1])
    assert not pools.can_hold(1)
    assert pools.can_allocate(1)
    assert pools.allocate("a", 1) == ([3], [])
    assert pools.tables_of("a") == ([1, 2, 3], [1])
    assert pools.shared_by_fork("a", 2) == ([1, 2], [])
    assert pools.usage == 1.0
    pools.check_integrity()
    pools.free("a")
    assert pools.can_hold(1)
    assert pools.usage == 0.0
    pools.check_integrity()


def test_requests_wait_for_a_slot() -> None:
    engine = engine_of(64, 2)
    for index in range(4):
        engine.add(fake_request(str(index), [index + 1] * 6, max_tokens=3))
    engine.step()
    assert len(engine.scheduler.queues.running) == 2
    assert len(engine.scheduler.queues.waiting) == 2
    engine.run()
    for index in range(4):
        assert engine.tokens(choice_key(str(index), 0, 0)) == fake_answer([index + 1] * 6, 3)
    assert engine.scheduler.pools.usage == 0.0


def test_choices_continue_from_copies_of_a_state() -> None:
    engine = engine_of(64, 4)
    engine.add(fake_request("a", [5] * 6, max_tokens=5, num_choices=3))
    engine.run()
    for choice in range(3):
        assert engine.tokens(choice_key("a", choice, 0)) == fake_answer([5] * 6, 5, choice)


def test_choices_without_a_slot_are_computed_later() -> None:
    engine = engine_of(64, 2)
    engine.add(fake_request("a", [5] * 6, max_tokens=5, num_choices=3))
    engine.run()
    for choice in range(3):
        assert engine.tokens(choice_key("a", choice, 0)) == fake_answer([5] * 6, 5, choice)


def test_a_prefix_is_not_reused_without_its_state() -> None:
    engine = engine_of(64, 4)
    for name in "ab":
        engine.add(fake_request(name, [5] * 12, max_tokens=2))
        engine.run()
    assert engine.scheduler.totals.num_cached_tokens == 0


@pytest.mark.parametrize("policy", ["chunked-prefill", "prefill-first"])
def test_as_many_requests_have_drafts_as_there_are_spare_slots(policy: str) -> None:
    """The others go on by one token a step. Those that a step of prompts leaves out keep their drafts for the next one."""
    engine = RecordedEngine(
        with_connector=False,
        cache=config_of(64, 6, num_spares=2),
        max_num_seqs=4,
        max_num_batched_tokens=64,
        scheduling_policy=policy,
    )
    prompts = {name: [index + 1] * 6 for index, name in enumerate("abcd")}
    for name, prompt in prompts.items():
        engine.add(fake_request(name, prompt, max_tokens=30))
        engine.step(3)
    engine.run()
    for name, prompt in prompts.items():
        assert engine.tokens(choice_key(name, 0, 0)) == fake_answer(prompt, 30)
    numbers = {len(scheduled.scheduled_spec_decode_tokens) for scheduled, _ in engine.steps}
    assert max(numbers) == 2
    lengths = {len(sampled) for _, _, sampled in engine.drafted()}
    assert {1, 2} <= lengths, "drafts are right, or not"


def test_drafts_end_where_a_snapshot_of_the_answer_is_due() -> None:
    engine = RecordedEngine(
        with_connector=False,
        cache=config_of(128, 5, num_spares=1),
        state_snapshots=2,
        max_num_seqs=2,
        max_num_batched_tokens=100,
    )
    prompt = [3] * 40
    engine.add(fake_request("a", prompt, max_tokens=120))
    engine.run()
    assert any(sampled for _, _, sampled in engine.drafted())
    answer = engine.tokens(choice_key("a", 0, 0))
    assert answer == fake_answer(prompt, 120)
    engine.add(fake_request("b", [*prompt, *answer], max_tokens=2))
    engine.run()
    assert engine.scheduler.totals.num_cached_tokens == 128


def test_the_states_of_an_aborted_request_with_drafts_are_free() -> None:
    engine = RecordedEngine(
        with_connector=False, cache=config_of(64, 3, num_spares=1), max_num_seqs=2, max_num_batched_tokens=64
    )
    for name in "abc":
        engine.add(fake_request(name, [5] * 6, max_tokens=40))
    engine.step(8)
    assert any(engine.drafted())
    engine.scheduler.abort_request("a", None)
    engine.run()
    for name in "bc":
        assert engine.tokens(choice_key(name, 0, 0)) == fake_answer([5] * 6, 40)
    assert engine.scheduler.pools.usage == 0.0


class MachineOfStatesWithDrafts(MachineOfStates):
    """Two slots of requests, one for drafts, and one for a snapshot, of any block."""

    cache = config_of(14, 4, num_spares=1)
    snapshot_unit = 2 * SIZE
    changes: ClassVar[dict[str, Any]] = {
        "speculate": "ngram",
        "num_speculative_tokens": 5,
        "state_snapshots": 1,
    }


TestStatesWithDrafts = machine_test(MachineOfStatesWithDrafts, 30, 40)


def test_a_layout_of_states_alone_has_blocks_without_bytes() -> None:
    """They count the tokens of a text, and are found by their content as others."""
    cache = config_of(9, 2, num_layers=0).cache
    assert cache.groups[0].layers == ()
    assert cache.groups[0].layout.block_bytes == 0
    assert msgspec.json.decode(msgspec.json.encode(cache), type=CacheLayout) == cache
    assert cache.fingerprint() != msgspec.structs.replace(cache, states=None).fingerprint()


def test_states_lie_behind_each_other() -> None:
    parts = (
        StatePart(layer=0, name="conv", shape=(3, 4), dtype="bfloat16"),
        StatePart(layer=0, name="recurrent", shape=(5, 5), dtype="float32"),
        StatePart(layer=2, name="conv", shape=(8, 4), dtype="bfloat16"),
    )
    layout = StateLayout(parts)
    assert [start for _, start in layout.placed()] == [0, 64, 192]
    assert (layout.slot_bytes, layout.num_layers) == (256, 2)


def snapshots_of(num_slots: int = 2, block_size: int = SIZE) -> StateSnapshots:
    return StateSnapshots(10, num_slots, block_size)


@pytest.mark.parametrize(("block_size", "unit"), [(4, 64), (16, 64), (48, 96), (128, 128)])
def test_snapshots_are_due_where_blocks_end(block_size: int, unit: int) -> None:
    """At the last multiple of 64 tokens before a prompt's end, behind each 2,048 tokens, and all along an answer."""
    snapshots = snapshots_of(block_size=block_size)
    assert snapshots.unit == unit
    num_prompt = 5 * unit + 1
    due = [end for end in range(8 * unit) if snapshots.is_due(end, num_prompt)]
    assert due == [5 * unit, 6 * unit, 7 * unit]
    assert not snapshots.is_due(0, 1)
    assert snapshots.is_due(2048 // unit * unit, 10**6)
    # A prompt that ends at a multiple is computed from the one before: its last token needs a step.
    assert snapshots.is_due(4 * unit, 5 * unit)


def test_a_step_ends_where_a_snapshot_is_due() -> None:
    snapshots = snapshots_of()
    steps = []
    start = 0
    while start < 5000:
        steps.append(snapshots.cut(start, min(1500, 5000 - start), 5000))
        start += steps[-1]
    assert steps == [1500, 548, 1500, 548, 896, 8]
    assert snapshots.cut(0, 64, 64) == 64
    assert snapshots.cut(0, 65, 65) == 64


def test_the_snapshot_that_was_used_last_stays() -> None:
    snapshots = snapshots_of()
    a, b, c = (BlockHash(bytes([number]) * 16) for number in range(3))
    first = snapshots.add("r", a, is_of_answer=False)
    second = snapshots.add("r", b, is_of_answer=False)
    assert {first, second} == {10, 11}
    assert snapshots.add("s", a, is_of_answer=False) == 0
    assert snapshots.add("s", c, is_of_answer=False) == second
    assert (snapshots.find(a), snapshots.find(b), snapshots.find(c)) == (first, 0, second)
    snapshots.forget([a, b])
    assert snapshots.find(a) == 0
    snapshots.clear()
    assert sorted(snapshots.slots()) == [10, 11]


def test_an_answer_has_one_snapshot() -> None:
    """Long answers would else push those of prompts out."""
    snapshots = snapshots_of(3)
    a, b, c = (BlockHash(bytes([number]) * 16) for number in range(3))
    snapshots.add("r", a, is_of_answer=False)
    snapshots.add("r", b, is_of_answer=True)
    snapshots.add("r", c, is_of_answer=True)
    assert snapshots.find(a)
    assert not snapshots.find(b)
    snapshots.release("r")
    snapshots.add("r", b, is_of_answer=True)
    assert snapshots.find(c)


class MachineOfSnapshots(MachineOfStates):
    """Fewer snapshots than places of texts; each block ends at one."""

    cache = config_of(14, 5)
    changes: ClassVar[dict[str, Any]] = {"state_snapshots": 3}


TestSnapshots = machine_test(MachineOfSnapshots, 40, 40)


def test_the_next_turn_of_a_chat_continues_near_its_end() -> None:
    engine = engine_of(256, 6, state_snapshots=2, max_num_batched_tokens=100, max_model_len=1000)
    prompt = [index % 90 for index in range(300)]
    engine.add(fake_request("a", prompt, max_tokens=180))
    engine.step(170)
    assert engine.num_started_early > 100
    engine.run()
    answer = engine.tokens(choice_key("a", 0, 0))
    engine.add(fake_request("b", [*prompt, *answer, 1, 2, 3], max_tokens=3))
    engine.run()
    num_cached = engine.scheduler.totals.num_cached_tokens
    assert len(prompt) + len(answer) - 64 <= num_cached == 448
    assert engine.tokens(choice_key("b", 0, 0)) == fake_answer([*prompt, *answer, 1, 2, 3], 3)


@pytest.mark.parametrize("policy", ["chunked-prefill", "prefill-first"])
def test_the_same_prompt_continues_at_its_last_snapshot(policy: str) -> None:
    """Prompts of prefill-first are not cut, so that they have none."""
    engine = engine_of(256, 6, state_snapshots=2, max_num_batched_tokens=400, scheduling_policy=policy)
    for name in "abc":
        engine.add(fake_request(name, [7] * 200, max_tokens=2))
        engine.run()
        assert engine.tokens(choice_key(name, 0, 0)) == fake_answer([7] * 200, 2)
    assert engine.scheduler.totals.num_cached_tokens == (2 * 192 if policy == "chunked-prefill" else 0)


def test_corrupt_states_are_forgotten() -> None:
    engine = engine_of(256, 6, state_snapshots=2, max_num_batched_tokens=400)
    for name in "ab":
        engine.add(fake_request(name, [*[7] * 100, NAN_TOKEN], max_tokens=2))
        engine.run()
    assert engine.scheduler.totals.num_cached_tokens == 0
    assert engine.scheduler.pools.snapshots is not None
    assert engine.scheduler.pools.snapshots.num_kept == 0
    engine.add(fake_request("c", [7] * 100, max_tokens=2))
    engine.run()
    assert engine.scheduler.pools.snapshots.num_kept == 1
    assert engine.scheduler.reset_prefix_cache()
    assert engine.scheduler.pools.snapshots.num_kept == 0
    engine.add(fake_request("d", [7] * 100, max_tokens=2))
    engine.run()
    assert engine.scheduler.totals.num_cached_tokens == 0
