"""KV tiers: what is stored behind the steps, which requests wait for it, and what happens when a copy is late or damaged."""

from typing import Any

import pytest

from contract.errors import SettingError
from engine.scheduling.requests.finish import RequestStatus
from engine.scheduling.tiers.slots import TierSlots
from engine.settings import EngineSettings
from tests.engine_scheduling.stepping import SteppedEngine, fake_request, fake_settings
from tests.fakes.engine.fakes import NAN_TOKEN, fake_answer
from tests.fakes.engine.tiers import FakeTierStorage

A, B = [1] * 6, [2] * 6
LENGTH = 16


def engine_with_tier(num_blocks: int = 8, num_slots: int = 32, **changes: Any) -> SteppedEngine:
    return SteppedEngine(
        with_connector=False, kv_cache_bytes=num_blocks, host_kv_bytes=num_slots, max_model_len=24, **changes
    )


def storage_of(engine: SteppedEngine) -> FakeTierStorage:
    return engine.executor.tiers[0]


def counter(engine: SteppedEngine, name: str) -> float:
    value = engine.core.call("counters", [])[f"kv_tier_{name}{{tier=host}}"]
    assert isinstance(value, int | float)
    return value


def step_until_swapped(engine: SteppedEngine) -> str:
    """Step until a request is preempted; return its key."""
    for _ in range(50):
        engine.step()
        for request in engine.scheduler.queues.waiting:
            if request.status is RequestStatus.PREEMPTED:
                return request.key
    raise AssertionError("nothing was preempted")


def num_computed(engine: SteppedEngine) -> int:
    return sum(engine.executor.runner.batch_sizes)


def evict(engine: SteppedEngine) -> None:
    """Let another request use the whole pool."""
    engine.add(fake_request(f"filler{num_computed(engine)}", [7 + num_computed(engine)] * 23, 1))
    engine.run()


def test_a_preempted_request_resumes_with_its_blocks_from_the_tier() -> None:
    """A16, A17: its blocks are in host memory while it waits; less than a block is recomputed, for the same answer."""
    engine = engine_with_tier()
    engine.add(fake_request("a", A, LENGTH), fake_request("b", B, LENGTH))
    victim = step_until_swapped(engine)
    stats = engine.scheduler.make_stats()
    assert victim == "b#0.0" and stats.num_swapped_reqs == 1
    assert engine.core.call("counters", [])["num_requests_swapped"] == 1
    stored = {block_hash for _, block_hash in storage_of(engine).contents.values()}
    preempted = engine.scheduler.requests[victim]
    num_full = (preempted.num_tokens - 1) // 4
    assert num_full >= 2 and stored.issuperset(preempted.block_hashes[:num_full])
    num_before = len(storage_of(engine).stores)
    engine.run()
    assert engine.tokens("a#0.0") == fake_answer(A, LENGTH)
    assert engine.tokens("b#0.0") == fake_answer(B, LENGTH)
    assert storage_of(engine).loads
    num_preempted = engine.core.call("counters", [])["num_preemptions_total"]
    num_again = num_computed(engine) - 2 * (len(A) + LENGTH - 1)
    assert 0 <= num_again < 4 * num_preempted
    assert len(storage_of(engine).stores) > num_before, "what is computed later is stored, too"


def test_an_abort_while_swapped_leaves_the_blocks_to_the_least_recently_used() -> None:
    """A17: nothing leaks: the pool is free, and each slot is free or has content, which the same prompt finds."""
    engine = engine_with_tier()
    engine.add(fake_request("a", A, LENGTH), fake_request("b", B, LENGTH))
    victim = step_until_swapped(engine)
    engine.core.abort([victim])
    engine.run()
    assert engine.pool.num_free_blocks == engine.pool.num_usable_blocks
    tiers = engine.scheduler.remote_kv.tiers
    assert tiers is not None
    (tier,) = tiers.tiers
    assert len(tier.slots) == len(storage_of(engine).contents)
    tier.slots.check_integrity(0)
    evict(engine)
    num_loads = len(storage_of(engine).loads)
    engine.add(fake_request("b2", B, LENGTH))
    engine.run()
    assert len(storage_of(engine).loads) == num_loads + 1
    assert engine.tokens("b2#0.0") == fake_answer(B, LENGTH)


def test_a_prompt_finds_its_evicted_prefix_in_the_tier() -> None:
    engine = engine_with_tier()
    prompt = [5] * 13
    engine.add(fake_request("first", prompt, 1))
    engine.run()
    evict(engine)
    computed = num_computed(engine)
    engine.add(fake_request("again", prompt, 2))
    engine.step()
    waiting = engine.scheduler.requests["again#0.0"]
    assert waiting.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert engine.request_counts() == (0, 1)
    engine.run()
    assert num_computed(engine) - computed == 2, "12 tokens come from the tier"
    assert engine.outputs["again#0.0"][0].num_cached_tokens == 12
    assert engine.tokens("again#0.0") == fake_answer(prompt, 2)
    assert counter(engine, "loaded_blocks_total") == 2, "the pool has the first one still"
    assert counter(engine, "bytes") == len(storage_of(engine).contents)


def test_a_damaged_block_and_what_follows_it_are_computed() -> None:
    """Law 3: the digest decides; what came before the damage is used, and the damaged slot is never tried again."""
    engine = engine_with_tier()
    prompt = [5] * 13
    engine.add(fake_request("first", prompt, 1))
    engine.run()
    evict(engine)
    storage = storage_of(engine)
    first_store = [copy for copies in storage.stores for copy in copies][:3]
    storage.damage(first_store[1].slot)
    computed = num_computed(engine)
    engine.add(fake_request("again", prompt, 2))
    engine.run()
    assert num_computed(engine) - computed == 13 - 4 + 1
    assert engine.tokens("again#0.0") == fake_answer(prompt, 2)
    assert counter(engine, "failed_blocks_total") == 1
    evict(engine)
    engine.add(fake_request("third", prompt, 2))
    engine.run()
    assert counter(engine, "failed_blocks_total") == 1, "it was stored anew"
    assert engine.tokens("third#0.0") == fake_answer(prompt, 2)


def test_a_block_is_not_given_to_others_while_it_is_copied_out() -> None:
    """Law 1: a pending store holds its block, so that the tier never has the content of the next owner."""
    engine = engine_with_tier(num_blocks=7)
    storage = storage_of(engine)
    storage.is_late = True
    engine.add(fake_request("first", [5] * 5, 1))
    engine.run()
    assert engine.pool.holders() == {"tier:host": 1}
    engine.add(fake_request("other", [6] * 23, 1))
    for _ in range(3):
        engine.step()
    assert engine.scheduler.queues.waiting.first is not None, "it needs the held block"
    storage.is_late = False
    storage.settle()
    engine.run()
    assert engine.tokens("other#0.0") == fake_answer([6] * 23, 1)
    engine.add(fake_request("again", [5] * 5, 3))
    engine.run()
    assert engine.tokens("again#0.0") == fake_answer([5] * 5, 3)


def test_the_blocks_of_an_aborted_load_stay_in_quarantine_until_it_ends() -> None:
    """Law 2: the copy that goes on writes into blocks that no request has."""
    engine = engine_with_tier()
    storage = storage_of(engine)
    engine.add(fake_request("first", [5] * 13, 1))
    engine.run()
    evict(engine)
    storage.is_late = True
    engine.add(fake_request("again", [5] * 13, 2))
    engine.step()
    storage.settle_stores()
    storage.begin()
    engine.core.abort(["again#0.0"])
    engine.step()
    assert engine.pool.count_by_state()["quarantined"] == 3
    storage.settle()
    engine.run()
    assert engine.pool.count_by_state()["quarantined"] == 0
    assert engine.pool.num_free_blocks == engine.pool.num_usable_blocks


def test_a_load_that_has_not_begun_is_cancelled() -> None:
    engine = engine_with_tier()
    storage = storage_of(engine)
    engine.add(fake_request("first", [5] * 13, 1))
    engine.run()
    evict(engine)
    storage.is_late = True
    engine.add(fake_request("again", [5] * 13, 2))
    engine.step()
    engine.core.abort(["again#0.0"])
    assert engine.pool.count_by_state()["quarantined"] == 0
    engine.run()
    engine.core.call("check_integrity", [])
    assert counter(engine, "failed_blocks_total") == 0


def test_a_load_that_takes_too_long_ends_in_computing() -> None:
    """Every waiting state has a way out (law 4); a tier that hangs is left alone until it answers."""
    engine = engine_with_tier(num_blocks=16, remote_kv_timeout_seconds=5)
    storage = storage_of(engine)
    prompt = [5] * 13
    engine.add(fake_request("first", prompt, 1))
    engine.run()
    for _ in range(3):
        evict(engine)
    storage.is_late = True
    engine.add(fake_request("again", prompt, 2))
    engine.step()
    storage.settle_stores()
    storage.begin()
    engine.now += 5.1
    engine.step()
    engine.run()
    assert engine.tokens("again#0.0") == fake_answer(prompt, 2)
    assert engine.pool.count_by_state()["quarantined"] > 0
    num_loads = len(storage.loads)
    for _ in range(3):
        evict(engine)
    engine.add(fake_request("third", prompt, 2))
    engine.run()
    assert engine.tokens("third#0.0") == fake_answer(prompt, 2)
    assert len(storage.loads) == num_loads, "it hangs still"
    storage.is_late = False
    storage.settle()
    engine.run()
    assert engine.pool.count_by_state()["quarantined"] == 0


def test_the_deadline_of_an_earlier_load_does_not_end_a_later_one() -> None:
    """Law 4: each wait has its own time: a request that is preempted loads its blocks once more."""
    engine = engine_with_tier(remote_kv_timeout_seconds=5)
    storage = storage_of(engine)
    engine.add(fake_request("first", B, 1))
    engine.run()
    evict(engine)
    engine.add(fake_request("a", A, LENGTH), fake_request("b", B, LENGTH))
    victim = step_until_swapped(engine)
    assert victim == "b#0.0" and len(storage.loads) == 1, "it has waited for its first block"
    engine.now = 4.0
    storage.is_late = True
    while len(storage.loads) == 1:
        engine.step()
    storage.settle_stores()
    storage.begin()
    engine.now = 5.1
    engine.step()
    assert engine.scheduler.requests[victim].status is RequestStatus.WAITING_FOR_REMOTE_KVS
    storage.settle()
    engine.run()
    assert engine.tokens(victim) == fake_answer(B, LENGTH)
    assert engine.pool.count_by_state()["quarantined"] == 0


def test_kv_with_nan_is_not_kept() -> None:
    """Law 1: neither what was stored of its prefix, nor what waits to be."""
    engine = engine_with_tier(max_num_batched_tokens=10)
    engine.add(fake_request("before", [3] * 9, 1))
    engine.run()
    assert len(storage_of(engine).contents) == 2, "an idle engine stores what is full"
    engine.add(fake_request("bad", [3] * 10 + [NAN_TOKEN], 2))
    engine.run()
    assert engine.end("bad#0.0").error_kind == "internal"
    evict(engine)
    engine.add(fake_request("good", [3] * 10, 2))
    engine.run()
    assert not storage_of(engine).loads


def test_a_reset_of_the_cache_reaches_the_tier() -> None:
    engine = engine_with_tier()
    engine.add(fake_request("first", [5] * 13, 1))
    engine.run()
    assert engine.core.call("reset_prefix_cache", [])
    assert counter(engine, "bytes") == 0
    engine.add(fake_request("again", [5] * 13, 2))
    engine.run()
    assert not storage_of(engine).loads


def test_what_the_tier_has_no_room_for_is_counted_and_computed() -> None:
    engine = engine_with_tier()
    storage_of(engine).num_stores_kept = 0
    engine.add(fake_request("first", [5] * 5, 1))
    engine.run()
    assert counter(engine, "failed_blocks_total") == 1
    assert counter(engine, "stored_blocks_total") == 0
    evict(engine)
    engine.add(fake_request("again", [5] * 5, 2))
    engine.run()
    assert engine.tokens("again#0.0") == fake_answer([5] * 5, 2)


def test_an_idle_engine_stores_what_is_left_and_is_woken_for_each_batch() -> None:
    engine = engine_with_tier(num_blocks=9)
    storage = storage_of(engine)
    storage.is_late = True
    engine.add(fake_request("first", [5] * 13, 1))
    engine.run()
    assert not engine.core.needs_step()
    while engine.woken.acquire(blocking=False):
        pass
    num_rounds = 0
    while storage.has_jobs:
        storage.carry_out()
        assert engine.woken.acquire(blocking=False)
        assert engine.core.needs_step()
        engine.run()
        num_rounds += 1
    assert num_rounds == len(storage.stores) == 3, "one block at a time, of a pool so small"
    assert counter(engine, "stored_blocks_total") == 3


def test_no_tier_without_prefix_caching() -> None:
    with pytest.raises(SettingError, match=r"host_kv_bytes is 9.*enable_prefix_caching"):
        fake_settings(host_kv_bytes=9, enable_prefix_caching=False)
    assert isinstance(fake_settings(enable_prefix_caching=False), EngineSettings)


def test_the_least_recently_used_content_is_evicted_unless_it_is_being_loaded() -> None:
    slots = TierSlots(2)
    for name in (b"a", b"b"):
        slot = slots.prepare_store(name)
        assert slot is not None
        slots.complete_store(name, slot, is_stored=True)
    slot_of_a = slots.prepare_load(b"a")
    slots.touch(b"b")
    slot = slots.prepare_store(b"c")
    assert slot is not None and slot != slot_of_a
    assert b"a" in slots and b"b" not in slots and slots.num_evicted == 1
    assert slots.prepare_store(b"d") is None, "one is loaded, one is being stored"
    slots.complete_store(b"c", slot, is_stored=True)
    slots.complete_load(b"a", slot_of_a)
    assert slots.prepare_store(b"d") == slot_of_a
    slots.check_integrity(1)


def test_content_that_is_dropped_while_it_is_copied_is_not_found_later() -> None:
    slots = TierSlots(2)
    slot = slots.prepare_store(b"a")
    assert slot is not None
    slots.drop([b"a"])
    slots.complete_store(b"a", slot, is_stored=True)
    assert b"a" not in slots
    slot = slots.prepare_store(b"b")
    assert slot is not None
    slots.complete_store(b"b", slot, is_stored=True)
    slots.prepare_load(b"b")
    slots.clear()
    assert slots.prepare_store(b"c") != slot, "it is still read"
    slots.complete_load(b"b", slot)
    slots.check_integrity(1)
