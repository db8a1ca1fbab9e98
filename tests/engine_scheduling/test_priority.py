"""The order of service and of preemption: priority, then arrival; and no request waits for ever (law 4)."""

from typing import Any

import pytest

from engine.scheduling.requests.finish import RequestStatus
from tests.engine_scheduling.stepping import (
    RECEIVE,
    SEND,
    SteppedEngine,
    arrive,
    both_policies,
    fake_request,
    receiving,
)
from tests.fakes.engine.fakes import fake_answer


def cramped(num_blocks: int = 8, **changes: Any) -> SteppedEngine:
    """7 usable blocks of 4 tokens, and no prefix caching that would hide recomputation."""
    return SteppedEngine(kv_cache_bytes=num_blocks, enable_prefix_caching=False, **changes)


def until_preempted(engine: SteppedEngine) -> set[str]:
    """Step until a request is preempted; return the keys of the preempted ones."""
    while True:
        engine.step()
        waiting = engine.scheduler.queues.waiting
        if victims := {r.key for r in waiting if r.status is RequestStatus.PREEMPTED}:
            return victims


@both_policies
@pytest.mark.parametrize(
    ("priorities", "victim"),
    [((0, 0), "second"), ((0, 1), "first"), ((1, 0), "second"), ((-1, -2), "second")],
)
def test_lowest_priority_then_youngest_is_preempted(priorities: tuple[int, int], victim: str) -> None:
    """B11: a request never loses its blocks to one of lower priority; among equals the younger one gives way."""
    engine = cramped()
    for name, priority in zip(("first", "second"), priorities, strict=True):
        engine.add(fake_request(name, [1, 2, 3, 4, 5, 6], max_tokens=14, priority=priority))
    assert until_preempted(engine) == {f"{victim}#0.0"}
    engine.run()
    for name in ("first", "second"):
        assert engine.tokens(f"{name}#0.0") == fake_answer([1, 2, 3, 4, 5, 6], 14)


@both_policies
def test_blocks_of_a_resumed_request_replace_the_old_ones() -> None:
    """B6: with other block ids than before, in whole; the fake runner would notice an appended or kept one."""
    engine = cramped()
    engine.add(*(fake_request(name, [1, 2, 3, 4, 5, 6], max_tokens=14) for name in ("old", "young")))
    engine.step()
    before = engine.pool.table_of("young#0.0")
    assert until_preempted(engine) == {"young#0.0"} and engine.pool.table_of("young#0.0") == []
    while engine.scheduler.requests["young#0.0"].status is RequestStatus.PREEMPTED:
        scheduled = engine.scheduler.schedule()
        engine.scheduler.update_from_output(scheduled, engine.executor.execute_model(scheduled))
    cached = scheduled.scheduled_cached_reqs
    place = cached.req_ids.index("young#0.0")
    assert cached.resumed_from_preemption[place]
    assert cached.new_block_ids[place][0] == engine.pool.table_of("young#0.0")
    assert cached.new_token_ids[place] == engine.scheduler.requests["young#0.0"].token_ids[:-1]
    assert len(cached.new_block_ids[place][0]) > len(before)


@both_policies
def test_preempted_requests_come_back_by_priority_then_arrival() -> None:
    """B11: whatever the order in which they lost their blocks; a new request of theirs waits behind them."""
    engine = cramped(10, max_num_seqs=3)
    for name, priority in (("low", 0), ("high", 2), ("mid", 1)):
        engine.add(fake_request(name, [1] * 7, max_tokens=24, priority=priority))
    engine.step()
    engine.add(fake_request("new", [2] * 4, max_tokens=2, priority=1))
    came_back: list[str] = []
    while engine.core.needs_step():
        engine.step()
        for request in engine.scheduler.queues.running:
            if request.key not in came_back and engine.scheduler.totals.num_preemptions:
                came_back.append(request.key)
    assert engine.scheduler.totals.num_preemptions >= 2
    assert came_back.index("high#0.0") < came_back.index("mid#0.0") < came_back.index("new#0.0")
    assert came_back.index("new#0.0") < came_back.index("low#0.0")
    assert engine.tokens("low#0.0") == fake_answer([1] * 7, 24)


@both_policies
def test_kv_that_arrived_starts_by_priority_then_arrival() -> None:
    """B11: one place in the batch, and three that could take it; a new request competes in the same order."""
    engine = SteppedEngine(max_num_seqs=1)
    engine.add(fake_request("runs", [9], max_tokens=3))
    engine.step()
    for name, priority in (("a", 0), ("b", 1), ("c", 0)):
        engine.add(fake_request(name, [1, 2], 2, priority=priority, transfer=RECEIVE))
        engine.connector.publish_peer(f"{name}#0.0")
    engine.step()
    for name in "cab":
        engine.connector.land(f"{name}#0.0")
    engine.add(fake_request("urgent", [1, 2], 2, priority=2), fake_request("new", [1, 2], 2))
    engine.run()
    assert list(engine.outputs) == [f"{name}#0.0" for name in ("runs", "urgent", "b", "a", "c", "new")]


@both_policies
def test_reservations_go_by_priority_then_arrival() -> None:
    """B11: the sender's order of publishing does not count."""
    engine = cramped(7)
    keys = {}
    for name, priority in (("a", 0), ("b", 0), ("c", 3)):
        engine.add(fake_request(name, [1] * 11, 3, priority=priority, transfer=RECEIVE))
        keys[name] = f"{name}#0.0"
    for name in "bac":
        engine.connector.publish_peer(keys[name])
    engine.step()
    states = [engine.connector.fetches[keys[name]].state for name in "abc"]
    assert states == ["reading", "published", "reading"]


@both_policies
def test_a_big_decode_leg_is_not_passed_by_small_ones_for_ever() -> None:
    """Law 4: small ones that keep coming would leave it no moment with enough free blocks; strict order does."""
    engine = cramped(9)
    big, num_added = "big#0.0", 0
    for step in range(200):
        while len(engine.scheduler.requests) < 5:
            engine.add(fake_request(f"small-{num_added}", [2] * 6, max_tokens=6, transfer=RECEIVE))
            num_added += 1
        if step == 10:
            receiving(engine, "big", [1] * 27, max_tokens=4)
        serve_fetches(engine)
        engine.step()
        if big in engine.outputs and len(engine.tokens(big)) == 3:
            break
    assert engine.tokens(big) == fake_answer([1] * 27, 4)[1:]
    assert step < 60 and num_added > 8


def test_a_long_local_prompt_is_not_starved_by_kv_that_keeps_arriving() -> None:
    """Law 4 for the mixture: chunk by chunk it would find its blocks reserved by others, and lose its own again."""
    engine = cramped(11, max_num_batched_tokens=6)
    local, num_added = "local#0.0", 0
    for step in range(300):
        if step == 10:
            engine.add(fake_request("local", [1] * 30, max_tokens=4))
        while sum(request.is_receiving for request in engine.scheduler.requests.values()) < 4:
            engine.add(fake_request(f"small-{num_added}", [2] * 6, max_tokens=3, transfer=RECEIVE))
            num_added += 1
        serve_fetches(engine, land_every=3, step=step)
        engine.step()
        if local in engine.outputs and len(engine.tokens(local)) == 4:
            break
    assert engine.tokens(local) == fake_answer([1] * 30, 4)
    assert engine.scheduler.totals.num_preemptions == 0 and num_added > 4


@both_policies
def test_local_prompts_do_not_starve_kv_that_waits() -> None:
    """Law 4 for the mixture, the other way round: a published one is before all that came after it."""
    engine = cramped(9)
    num_added = 0
    key = "d#0.0"
    for step in range(200):
        while len(engine.scheduler.requests) < 5:
            engine.add(fake_request(f"local-{num_added}", [2] * 6, max_tokens=6))
            num_added += 1
        if step == 10:
            receiving(engine, "d", [1] * 27, max_tokens=4)
        serve_fetches(engine)
        engine.step()
        if key in engine.outputs and len(engine.tokens(key)) == 3:
            break
    assert engine.tokens(key) == fake_answer([1] * 27, 4)[1:]
    assert step < 60 and num_added > 8


@both_policies
def test_a_request_that_does_not_wait_for_blocks_holds_up_no_other() -> None:
    """A fetch whose sender has not published stands in no line: later ones of every kind pass it."""
    engine = cramped(7)
    silent = receiving(engine, "silent", [1] * 23)
    other = receiving(engine, "other", [2] * 7)
    arrive(engine, other)
    engine.add(fake_request("local", [3] * 7, max_tokens=2))
    engine.run()
    assert engine.tokens("local#0.0") == fake_answer([3] * 7, 2)
    assert engine.tokens(other) == fake_answer([2] * 7, 4)[1:]
    assert engine.connector.fetches[silent].state == "asked"


@both_policies
def test_kv_that_arrived_gives_way_to_a_running_request_before_it() -> None:
    """B11: one that waits for its place with blocks in hand is preempted rather than a running one of its betters."""
    engine = cramped(8, max_num_seqs=1)
    engine.add(fake_request("first", [1] * 8, max_tokens=12))
    engine.step()
    key = receiving(engine, "d", [2] * 10, max_tokens=6)
    arrive(engine, key)
    assert until_preempted(engine) == {key}
    engine.run()
    assert engine.tokens("first#0.0") == fake_answer([1] * 8, 12)
    assert engine.tokens(key) == fake_answer([2] * 10, 6)[1:]
    assert engine.outputs[key][0].first_index == 1


def test_a_prefill_leg_is_never_preempted_for_a_higher_priority() -> None:
    """Law 4 before B11: another worker reads its blocks."""
    engine = cramped(9, max_num_batched_tokens=3)
    engine.add(fake_request("a", [1, 2, 3], max_tokens=25, priority=5))
    engine.step()
    engine.add(fake_request("p", [2] * 26, transfer=SEND, priority=-5))
    engine.run()
    assert engine.tokens("p#0.0") == fake_answer([2] * 26, 1)
    assert engine.scheduler.totals.num_preemptions == 1
    assert "a#0.0" in engine.scheduler.requests, "it is the aggregated one that was preempted"
    engine.connector.end_lease("p#0.0")
    engine.run()
    assert engine.tokens("a#0.0") == fake_answer([1, 2, 3], 25)


def test_a_started_prompt_keeps_the_blocks_that_it_was_promised() -> None:
    """Law 4: a prefill leg takes all its blocks at once and gives none back, so it starts beside it or not at all."""
    engine = cramped(9, max_num_batched_tokens=8)
    engine.add(fake_request("local", [1] * 20, max_tokens=2))
    engine.step()
    engine.add(fake_request("p", [2] * 16, transfer=SEND, priority=1))
    engine.run()
    assert engine.scheduler.totals.num_preemptions == 0
    assert engine.tokens("local#0.0") == fake_answer([1] * 20, 2)
    assert engine.tokens("p#0.0") == fake_answer([2] * 16, 1)


def test_published_kv_leaves_the_blocks_that_a_started_prompt_was_promised() -> None:
    """Law 4: what it reserves it holds until its answer ends; the prompt would have to give way half computed."""
    engine = cramped(9, max_num_batched_tokens=8)
    engine.add(fake_request("local", [1] * 20, max_tokens=2))
    engine.step()
    key = receiving(engine, "d", [2] * 16)
    engine.connector.publish_peer(key)
    engine.step()
    assert engine.pool.num_blocks_of(key) == 0
    engine.run()
    engine.connector.land(key)
    engine.run()
    assert engine.tokens("local#0.0") == fake_answer([1] * 20, 2)
    assert engine.tokens(key) == fake_answer([2] * 16, 4)[1:]
    assert engine.scheduler.totals.num_preemptions == 0


@both_policies
def test_kv_that_arrived_runs_although_one_before_it_lacks_blocks() -> None:
    """Law 4: the blocks that the first in line waits for are in its hands; holding it up would be a cycle."""
    engine = cramped(8)
    key = receiving(engine, "d", [2] * 10, max_tokens=3)
    engine.connector.publish_peer(key)
    engine.step()
    engine.add(fake_request("urgent", [1] * 20, max_tokens=2, priority=1))
    engine.step()
    engine.connector.land(key)
    engine.run()
    assert engine.tokens(key) == fake_answer([2] * 10, 3)[1:]
    assert engine.tokens("urgent#0.0") == fake_answer([1] * 20, 2)


def serve_fetches(engine: SteppedEngine, *, land_every: int = 1, step: int = 0) -> None:
    """The peers publish at once, and what is being read lands in every ``land_every``-th step."""
    for key, fetch in list(engine.connector.fetches.items()):
        if fetch.state == "asked":
            engine.connector.publish_peer(key)
        elif fetch.state == "reading" and step % land_every == 0:
            engine.connector.land(key)
