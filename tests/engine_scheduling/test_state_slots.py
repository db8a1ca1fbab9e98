"""Slots for the states of recurrent layers: one of each request, which nothing else reads or writes.

The FakeRunner checks at each step that a slot has absorbed exactly the tokens before it (the state rule).
"""

from typing import Any, ClassVar

import msgspec
import pytest

from contract.cache_layout import CacheLayout
from contract.errors import UnavailableError
from contract.layout import KVLayout
from contract.membership import RoleOrder
from contract.requests import choice_key
from contract.state_layout import StateLayout, StatePart
from engine.kv_cache.startup import KVCacheConfig
from engine.scheduling.blocks.block_pool import BlockPool, blocks_needed
from engine.scheduling.blocks.cache_pools import CachePools
from engine.scheduling.blocks.state_slots import StateSlots
from engine.scheduling.requests.request import Request
from tests.engine_scheduling.stepping import SteppedEngine, fake_request
from tests.engine_scheduling.test_state_machine import SchedulerMachine
from tests.fakes.engine.fakes import fake_answer
from tests.soak_settings import machine_settings, soaked
from worker.flipping import Flip

SIZE = 4
STATES = StateLayout((StatePart(layer=0, name="recurrent", shape=(2,), dtype="float32"),))


def config_of(num_blocks: int, num_slots: int, num_layers: int = 1) -> KVCacheConfig:
    """Return an allocation of layers that keep all tokens, and of slots."""
    layout = KVLayout(num_layers=num_layers, num_kv_heads=1, head_dim=1, block_size=SIZE, dtype="float32")
    return KVCacheConfig((num_blocks,), CacheLayout.of(layout, [None] * num_layers, STATES), num_slots)


def engine_of(num_blocks: int, num_slots: int, **changes: Any) -> SteppedEngine:
    small = {"max_num_seqs": 4, "max_num_batched_tokens": 32, **changes}
    return SteppedEngine(with_connector=False, cache=config_of(num_blocks, num_slots), **small)


class MachineOfStates(SchedulerMachine):
    """Fewer slots than places, so that requests wait for one."""

    has_connector = False
    num_slots = 2

    def __init__(self) -> None:
        super().__init__()
        changes = {**self.memory, **self.batching, **self.changes}
        cache = config_of(14, self.num_slots)
        self.engine = SteppedEngine(with_connector=False, cache=cache, max_num_seqs=3, **changes)

    def _fits(self, request: Request) -> bool:
        pools = self.engine.scheduler.pools
        cached = pools.find_cached(request.reusable_hashes)
        return pools.can_hold(blocks_needed(request.num_tokens, SIZE) - len(cached[0]), cached)


TestStates = MachineOfStates.TestCase
TestStates.settings = machine_settings(30, 40)
TestStates.runTest = soaked(TestStates.runTest)  # type: ignore[method-assign]


class MachineOfManySlots(MachineOfStates):
    """Blocks run short before slots, so that requests are preempted."""

    num_slots = 9
    batching: ClassVar[dict[str, Any]] = {"max_num_batched_tokens": 12}


TestManySlots = MachineOfManySlots.TestCase
TestManySlots.settings = machine_settings(30, 40)
TestManySlots.runTest = soaked(TestManySlots.runTest)  # type: ignore[method-assign]


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


def test_drafts_are_off_and_the_log_tells(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="engine.startup")
    engine = engine_of(64, 4, speculate="ngram")
    assert engine.scheduler.batcher.drafting is None
    assert "no drafts: a state of recurrent layers cannot forget those that were wrong" in caplog.text


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


async def test_a_worker_with_states_keeps_its_role() -> None:
    engine = engine_of(64, 4)
    assert engine.core.info.why_alone
    nothing: Any = None
    flip = Flip(nothing, nothing, lambda: nothing, engine.core.info.why_alone)
    with pytest.raises(UnavailableError, match="takes no other role: the states of the model's recurrent"):
        flip.begin(RoleOrder(role="prefill", epoch=1))
