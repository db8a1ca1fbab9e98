"""The scheduler's two directions of a hand-over, against the contract in ``engine/connector.py``."""

import pytest

from contract.outputs import FinishReason
from contract.sampling import choice_seed
from engine.scheduling.requests.finish import RequestStatus
from tests.engine_scheduling.stepping import (
    PROMPT,
    RECEIVE,
    SEND,
    SteppedEngine,
    arrive,
    both_policies,
    fake_request,
    receiving,
)
from tests.fakes.engine.fakes import NAN_TOKEN, fake_answer

# The prefill leg.


def test_prefill_leg_reserves_its_whole_prompt_then_publishes_each_chunk_and_lends_its_blocks() -> None:
    """B8, B19: orders travel as kv_connector_metadata; finished_sending drops the lease's references."""
    engine = SteppedEngine(max_num_batched_tokens=4)
    engine.add(fake_request("p", PROMPT, 5, transfer=SEND))
    published = []
    for _ in range(3):
        scheduled = engine.scheduler.schedule()
        published.append(scheduled.kv_connector_metadata)
        assert engine.pool.num_blocks_of("p#0.0") == 3
        outputs = engine.scheduler.update_from_output(scheduled, engine.executor.execute_model(scheduled))
    assert published == [[("p#0.0", 4)], [("p#0.0", 8)], [("p#0.0", 10)]]
    (first,) = outputs[0]
    assert first.token_ids == fake_answer(PROMPT, 1) and first.is_leg_finished
    assert first.finish_reason is None and first.num_cached_tokens == 0 and first.timings is not None
    send = engine.connector.sends["p#0.0"]
    assert send.end == "finished" and [t.token_id for t in send.first_tokens] == first.token_ids
    assert engine.pool.holders() == {"lease:p#0.0": 3}
    engine.run()
    assert not engine.core.needs_step()
    engine.connector.end_lease("p#0.0")
    engine.run()
    assert engine.pool.holders() == {}


def test_prefill_leg_starts_only_when_its_whole_prompt_fits() -> None:
    """Law 4: no block is held before all fit, and one with published blocks is never preempted."""
    engine = SteppedEngine(kv_cache_bytes=9, max_num_batched_tokens=4, enable_prefix_caching=False)
    engine.add(fake_request("a", [1] * 12, max_tokens=20))
    engine.step(3)
    engine.add(fake_request("p", [2] * 23, transfer=SEND))
    engine.step(3)
    assert engine.pool.num_blocks_of("p#0.0") == 0 and not engine.connector.sends
    engine.run()
    assert engine.pool.holders() == {"lease:p#0.0": 6}
    assert engine.tokens("p#0.0") == fake_answer([2] * 23, 1)


def test_running_prefill_leg_outlives_an_aggregated_request_that_needs_blocks() -> None:
    """Law 4: the preempted one is the aggregated request, even though it is older."""
    engine = SteppedEngine(kv_cache_bytes=9, max_num_batched_tokens=3, enable_prefix_caching=False)
    engine.add(fake_request("a", [1, 2, 3], max_tokens=25))
    engine.step()
    engine.add(fake_request("p", [2] * 26, transfer=SEND))
    engine.run()
    assert engine.tokens("p#0.0") == fake_answer([2] * 26, 1)
    assert engine.scheduler.totals.num_preemptions == 1
    assert "a#0.0" in engine.scheduler.requests and not engine.core.needs_step()
    engine.connector.end_lease("p#0.0")
    engine.run()
    assert engine.tokens("a#0.0") == fake_answer([1, 2, 3], 25)


@both_policies
def test_cached_tokens_are_published_when_the_send_opens() -> None:
    engine = SteppedEngine()
    engine.add(fake_request("a", PROMPT, 1))
    engine.run()
    engine.add(fake_request("p", PROMPT, transfer=SEND))
    engine.step()
    assert engine.outputs["p#0.0"][0].num_cached_tokens == 8
    assert engine.connector.sends["p#0.0"].num_published == 10


@both_policies
@pytest.mark.parametrize("how", ["max_tokens", "eos"])
def test_answer_that_ends_at_its_first_token_is_not_needed_elsewhere(how: str) -> None:
    engine = SteppedEngine()
    if how == "eos":
        engine.add(fake_request("p", PROMPT, 5, transfer=SEND, eos_token_ids=tuple(fake_answer(PROMPT, 1))))
    else:
        engine.add(fake_request("p", PROMPT, 1, transfer=SEND))
    engine.step()
    assert engine.connector.sends["p#0.0"].end == "not_needed"
    reason = FinishReason.STOP if how == "eos" else FinishReason.LENGTH
    assert engine.end("p#0.0").finish_reason is reason
    assert engine.pool.holders() == {"lease:p#0.0": 3}


@both_policies
def test_corrupt_prefill_leg_abandons_with_an_error() -> None:
    engine = SteppedEngine()
    engine.add(fake_request("p", [*PROMPT, NAN_TOKEN], transfer=SEND))
    engine.step()
    assert engine.connector.sends["p#0.0"].end == "internal"
    assert engine.end("p#0.0").error_kind == "internal"


def test_key_of_a_lease_is_in_use() -> None:
    engine = SteppedEngine()
    engine.add(fake_request("p", PROMPT, transfer=SEND))
    engine.run()
    engine.core.add_request(fake_request("p", PROMPT))
    assert [output.error_kind for output in engine.core.step()[0]] == ["invalid_request"]


# The decode leg.


@both_policies
def test_decode_leg_waits_without_blocks_then_reserves_then_runs() -> None:
    """B8, B13: WAITING_FOR_REMOTE_KVS → (published: blocks) → WAITING → RUNNING; the second token is emitted first."""
    engine = SteppedEngine()
    key = receiving(engine)
    request = engine.scheduler.requests[key]
    engine.run()
    assert request.status.name == "WAITING_FOR_REMOTE_KVS"
    assert engine.pool.holders() == {} and engine.connector.fetches[key].state == "asked"
    engine.connector.publish_peer(key)
    engine.run()
    assert request.status.name == "WAITING_FOR_REMOTE_KVS"
    assert engine.pool.num_blocks_of(key) == 3 and engine.connector.fetches[key].tables[0] == [1, 2, 3]
    engine.connector.land(key)
    engine.scheduler.on_transfers_finished(*engine.connector.rank.get_finished())
    assert request.status.name == "WAITING" and request.num_computed_tokens == 10
    scheduled = engine.scheduler.schedule()
    new = scheduled.scheduled_new_reqs[0]
    assert new.prompt_token_ids == PROMPT + fake_answer(PROMPT, 1)
    assert (new.num_computed_tokens, new.num_prompt_tokens) == (10, 10)
    assert scheduled.num_scheduled_tokens == {key: 1}
    engine.now = 2.0
    for outputs in engine.scheduler.update_from_output(
        scheduled, engine.executor.execute_model(scheduled)
    ).values():
        engine.outputs[key] = outputs
    engine.run()
    assert engine.outputs[key][0].first_index == 1
    assert engine.tokens(key) == fake_answer(PROMPT, 4)[1:]
    assert engine.end(key).finish_reason is FinishReason.LENGTH
    timings = engine.outputs[key][0].timings
    assert timings is not None
    assert (timings.transfer.exposed_seconds, timings.transfer.hidden_seconds) == (0.25, 0.5)
    assert timings.prefill_seconds == 0.0
    assert engine.pool.holders() == {}


@both_policies
def test_kv_that_has_arrived_joins_the_next_step() -> None:
    """No empty step runs between the last byte and the second token."""
    engine = SteppedEngine()
    key = receiving(engine)
    engine.connector.publish_peer(key)
    engine.run()
    engine.connector.land(key)
    num_before = engine.executor.runner.num_forward_passes
    engine.step()
    assert engine.executor.runner.num_forward_passes == num_before + 1
    assert engine.tokens(key) == fake_answer(PROMPT, 2)[1:]


@both_policies
def test_the_first_token_is_the_decode_legs_input_and_is_not_emitted_again() -> None:
    """Law 5: the router has delivered it already."""
    engine = SteppedEngine()
    key = receiving(engine)
    arrive(engine, key)
    engine.run()
    assert engine.outputs[key][0].first_index == 1
    assert engine.tokens(key) == fake_answer(PROMPT, 4)[1:]


@both_policies
def test_reservation_includes_the_place_of_the_first_token() -> None:
    """Law 4: ceil((prompt + 1) / block_size) blocks, of which the prompt's are read into."""
    engine = SteppedEngine()
    key = receiving(engine, prompt=PROMPT[:8])
    engine.connector.publish_peer(key)
    engine.step()
    assert engine.pool.num_blocks_of(key) == 3
    assert engine.connector.fetches[key].tables[0] == [1, 2]


@both_policies
def test_fetched_and_verified_blocks_are_cached_and_not_fetched_again() -> None:
    engine = SteppedEngine()
    prompt = list(range(1, 13))
    first = receiving(engine, "d1", prompt)
    arrive(engine, first)
    engine.run()
    second = receiving(engine, "d2", prompt)
    engine.connector.publish_peer(second)
    engine.step()
    fetch = engine.connector.fetches[second]
    assert fetch.num_cached_blocks == 3 and fetch.destination == []
    engine.connector.land(second)
    engine.run()
    assert engine.tokens(second) == engine.tokens(first) == fake_answer(prompt, 4)[1:]
    assert [engine.outputs[key][0].num_cached_tokens for key in (first, second)] == [0, 12]


@both_policies
def test_blocks_in_flight_are_not_cached() -> None:
    """Law 1: a block enters the prefix index only when verified."""
    engine = SteppedEngine()
    first, second = receiving(engine, "d1"), receiving(engine, "d2")
    engine.connector.publish_peer(first)
    engine.connector.publish_peer(second)
    engine.step()
    assert engine.connector.fetches[second].num_cached_blocks == 0


@both_policies
def test_one_that_does_not_fit_waits_and_is_not_passed() -> None:
    """Law 4: all or nothing, strictly in order of arrival; a small one that would fit waits behind the big one."""
    engine = SteppedEngine(kv_cache_bytes=9, enable_prefix_caching=False)
    running = receiving(engine, "r", [1] * 11, max_tokens=6)
    arrive(engine, running)
    big, small = receiving(engine, "big", [2] * 23), receiving(engine, "small", [3] * 7)
    for key in (big, small):
        engine.connector.publish_peer(key)
    engine.step()
    for key in (big, small):
        assert engine.connector.fetches[key].state == "published" and engine.pool.num_blocks_of(key) == 0
    engine.run()
    assert engine.connector.fetches[big].state == "reading"
    for key in (big, small):
        engine.connector.land(key)
    engine.run()
    assert engine.tokens(big) == fake_answer([2] * 23, 4)[1:]
    assert engine.tokens(small) == fake_answer([3] * 7, 4)[1:]


@both_policies
def test_arrived_requests_wait_for_a_place_in_the_batch() -> None:
    """A27: max_num_seqs bounds them too."""
    engine = SteppedEngine(max_num_seqs=1)
    engine.add(fake_request("a", [1, 2], max_tokens=5))
    engine.step()
    key = receiving(engine)
    arrive(engine, key)
    assert engine.scheduler.requests[key].status is RequestStatus.WAITING
    engine.run()
    assert engine.tokens(key) == fake_answer(PROMPT, 4)[1:]


@both_policies
def test_decode_leg_is_preempted_and_recomputes() -> None:
    """Short of blocks a decode leg recomputes its prompt here; its answer stays the same."""
    engine = SteppedEngine(kv_cache_bytes=8, enable_prefix_caching=False)
    engine.add(fake_request("a", [1] * 8, max_tokens=12))
    engine.step()
    key = receiving(engine, "d", PROMPT, max_tokens=8)
    arrive(engine, key)
    engine.run()
    assert engine.scheduler.totals.num_preemptions > 0
    assert engine.tokens("a#0.0") == fake_answer([1] * 8, 12)
    assert engine.tokens(key) == fake_answer(PROMPT, 8)[1:]


@both_policies
def test_failed_transfer_ends_with_its_error() -> None:
    engine = SteppedEngine()
    key = receiving(engine)
    engine.connector.publish_peer(key)
    engine.step()
    engine.connector.fail(key, "transfer_failed", "digest of block 2 differs")
    engine.run()
    end = engine.end(key)
    assert (end.error_kind, end.error_message) == ("transfer_failed", "digest of block 2 differs")
    assert engine.pool.count_by_state() == {"null": 1, "free": 63, "held": 0, "quarantined": 0}


@both_policies
def test_not_needed_is_no_error() -> None:
    """The first token ended the answer at the prefill leg: the decode leg ends without an output of its own."""
    engine = SteppedEngine()
    key = receiving(engine)
    engine.connector.fail(key, "not_needed", "the answer ended at its first token")
    engine.run()
    end = engine.end(key)
    assert (end.finish_reason, end.error_kind, end.token_ids) == (None, None, [])


@both_policies
def test_a_wait_that_timed_out_keeps_its_blocks_in_quarantine_until_its_read_ends() -> None:
    """Law 4: the wait for remote KV has a deadline; law 2: a read that goes on keeps its blocks in quarantine."""
    engine = SteppedEngine(remote_kv_timeout_seconds=7.0)
    quiet, reading = receiving(engine, "quiet"), receiving(engine, "reading")
    engine.connector.publish_peer(reading)
    engine.run()
    assert engine.core.seconds_to_deadline() == 7.0
    engine.now = 7.5
    engine.step()
    assert [engine.end(key).error_kind for key in (quiet, reading)] == ["deadline", "deadline"]
    assert engine.pool.count_by_state()["quarantined"] == 3
    assert engine.core.call("reset_prefix_cache", []) is False
    engine.connector.drain(reading)
    engine.run()
    assert engine.pool.num_free_blocks == engine.pool.num_usable_blocks


@both_policies
def test_remote_deadline_does_not_touch_what_has_arrived() -> None:
    engine = SteppedEngine(remote_kv_timeout_seconds=7.0)
    key = receiving(engine, max_tokens=30)
    arrive(engine, key)
    engine.step(2)
    engine.now = 8.0
    engine.run()
    assert engine.tokens(key) == fake_answer(PROMPT, 30)[1:]


def test_two_deadlines_at_once_end_a_request_once() -> None:
    engine = SteppedEngine(remote_kv_timeout_seconds=7.0)
    engine.add(fake_request("d", PROMPT, transfer=RECEIVE, deadline_seconds=7.0))
    engine.now = 9.0
    engine.run()
    assert [output.error_kind for output in engine.outputs["d#0.0"]] == ["deadline"]


def test_abort_before_the_failure_was_processed() -> None:
    """A transfer may fail while its cancellation is on the way: one end, and the blocks are free."""
    engine = SteppedEngine()
    key = receiving(engine)
    engine.connector.publish_peer(key)
    engine.step()
    engine.connector.fail(key)
    engine.core.abort([key])
    engine.run()
    assert [output.finish_reason for output in engine.outputs[key]] == [FinishReason.ABORT]
    assert engine.pool.num_free_blocks == engine.pool.num_usable_blocks


def test_transfer_without_connector_is_refused() -> None:
    engine = SteppedEngine(with_connector=False)
    engine.add(fake_request("p", PROMPT, transfer=SEND))
    engine.run()
    assert engine.end("p#0.0").error_kind == "invalid_request"


# Abort in every state (B12).


@pytest.mark.parametrize("state", ["waiting", "chunking", "running", "preempted"])
def test_abort_of_an_aggregated_request(state: str) -> None:
    """B12: finish_requests for one or many ids, in every state."""
    engine = SteppedEngine(max_num_batched_tokens=4, kv_cache_bytes=6, enable_prefix_caching=False)
    if state == "preempted":
        engine.add(fake_request("other", [9] * 8, 12))
        engine.step(2)
    engine.add(fake_request("a", [1] * (8 if state in ("chunking", "preempted") else 3), 9))
    request = engine.scheduler.requests["a#0.0"]
    if state == "preempted":
        while request.status is not RequestStatus.PREEMPTED:
            engine.step()
    else:
        engine.step({"waiting": 0, "chunking": 1, "running": 2}[state])
    assert request.status.name == {"chunking": "RUNNING"}.get(state, state.upper())
    engine.scheduler.finish_requests("a#0.0", RequestStatus.FINISHED_ABORTED)
    engine.scheduler.finish_requests(["a#0.0", "unknown"], RequestStatus.FINISHED_ABORTED)
    engine.run()
    assert engine.end("a#0.0").finish_reason is FinishReason.ABORT
    assert engine.pool.num_free_blocks == engine.pool.num_usable_blocks


@both_policies
def test_replay_of_another_choice_continues_with_the_token_that_its_sender_computed() -> None:
    """Law 6: the seed of a choice plays its part in the answer's first token, which a replay has behind it."""
    answer = fake_answer(PROMPT, 4, choice=1)
    engine = SteppedEngine()
    engine.add(
        fake_request(
            "d",
            [*PROMPT, answer[0]],
            4,
            transfer=RECEIVE,
            attempt=1,
            choice=1,
            first_index=2,
            sampling={"seed": choice_seed(0, 1)},
        )
    )
    engine.step()
    arrive(engine, "d#1.1")
    engine.run()
    assert engine.tokens("d#1.1") == answer[2:]
