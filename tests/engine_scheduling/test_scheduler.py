"""Aggregated requests: budget, chunks, caching, preemption, limits, endings."""

import pytest

from contract.outputs import FinishReason
from engine.scheduling.requests.finish import RequestStatus
from tests.engine_scheduling.stepping import EACH_POLICY, RECEIVE, SteppedEngine, fake_request
from tests.fakes.engine.fakes import NAN_TOKEN, fake_answer

pytestmark = EACH_POLICY


def test_add_request_only_enqueues_and_each_step_advances_by_one_token() -> None:
    """A18, A19, B10: nothing runs until a step; then one token a step, to the end."""
    engine = SteppedEngine()
    engine.add(fake_request("a", [1, 2, 3], max_tokens=3, priority=2, client_index=0, cache_salt="s"))
    assert engine.executor.runner.num_forward_passes == 0
    request = engine.scheduler.requests["a#0.0"]
    asked = request.engine_request
    assert (asked.priority, asked.client_index, asked.cache_salt) == (2, 0, "s")
    assert request.structured_output_request is None
    for num_tokens in (1, 2, 3):
        engine.step()
        assert engine.tokens("a#0.0") == fake_answer([1, 2, 3], num_tokens)
    assert engine.end("a#0.0").finish_reason is FinishReason.LENGTH
    engine.run()
    assert engine.pool.num_free_blocks == engine.pool.num_usable_blocks


def test_offline_loop_steps_until_everything_is_finished() -> None:
    """A20: add prompts one by one, step until done, every answer is there."""
    engine = SteppedEngine(with_connector=False)
    prompts = [[n, n + 1, n + 2] * (1 + n) for n in range(1, 9)]
    for index, prompt in enumerate(prompts):
        engine.add(fake_request(f"r{index}", prompt, max_tokens=5))
    engine.run()
    for index, prompt in enumerate(prompts):
        assert engine.tokens(f"r{index}#0.0") == fake_answer(prompt, 5)


def test_outputs_go_to_the_client_that_asked() -> None:
    """B7: outputs by client index."""
    engine = SteppedEngine()
    engine.add(fake_request("a", [1], client_index=0), fake_request("b", [2], client_index=3))
    outputs = engine.core.step()
    assert {index: [o.request_id for o in of_client] for index, of_client in outputs.items()} == {
        0: ["a"],
        3: ["b"],
    }


def test_no_more_than_max_num_seqs_run() -> None:
    """A27, B15: the others wait, and are counted as waiting."""
    engine = SteppedEngine(max_num_seqs=2)
    engine.add(*(fake_request(f"r{n}", [n + 1], max_tokens=2) for n in range(3)))
    assert engine.request_counts() == (0, 3)
    engine.step()
    assert engine.request_counts() == (2, 1)
    assert len(engine.scheduler.requests) == 3
    assert engine.scheduler.requests and not engine.scheduler.live.finished_req_ids
    engine.step()
    assert engine.scheduler.live.finished_req_ids and engine.scheduler.has_requests()
    engine.run()
    assert not engine.scheduler.has_requests()


def test_higher_priority_starts_earlier() -> None:
    """B10: among equals the order of arrival; one that runs is not interrupted."""
    engine = SteppedEngine(max_num_seqs=1)
    engine.add(fake_request("first", [1], 2))
    engine.step()
    for name, priority in (("low", -1), ("a", 0), ("high", 5), ("b", 0)):
        engine.add(fake_request(name, [1], 2, priority=priority))
    engine.run()
    assert list(engine.outputs) == [f"{name}#0.0" for name in ("first", "high", "a", "b", "low")]


def test_blocks_are_handed_out_on_demand() -> None:
    """A14: 9 prompt tokens hold 3 blocks of 4 until the 13th token needs its place."""
    engine = SteppedEngine()
    engine.add(fake_request("a", list(range(1, 10)), max_tokens=12))
    engine.step()
    assert engine.pool.num_blocks_of("a#0.0") == 3
    engine.step(3)
    assert engine.pool.num_blocks_of("a#0.0") == 3
    engine.step()
    assert engine.pool.num_blocks_of("a#0.0") == 4


def test_prompt_too_long_or_too_big_is_answered_at_once() -> None:
    """A27, A28: FINISHED_IGNORED with an error that names the sizes; the others are not held up."""
    engine = SteppedEngine(kv_cache_bytes=9, max_model_len=30)
    engine.add(fake_request("long", [1] * 30), fake_request("ok", [1] * 29))
    engine.run()
    end = engine.end("long#0.0")
    assert (end.finish_reason, end.error_kind) == (FinishReason.ERROR, "invalid_request")
    assert "30" in (end.error_message or "") and "29" in (end.error_message or "")
    counters = engine.core.call("counters", [])
    assert (counters["requests_ignored_total"], counters["requests_failed_total"]) == (1, 1)
    assert engine.end("ok#0.0").finish_reason is FinishReason.LENGTH
    assert engine.tokens("ok#0.0") == fake_answer([1] * 29, 1)


@pytest.mark.parametrize(
    ("prompt", "sampling", "what"),
    [([], {}, "empty"), ([5000], {}, "vocabulary"), ([1], {"temperature": 9.0}, "temperature")],
)
def test_bad_input_is_answered_with_an_error(
    prompt: list[int], sampling: dict[str, float], what: str
) -> None:
    """A9: add-request with error handling."""
    engine = SteppedEngine()
    engine.add(fake_request("bad", prompt, sampling=sampling))
    engine.run()
    assert engine.end("bad#0.0").error_kind == "invalid_request"
    assert what in (engine.end("bad#0.0").error_message or "")


def test_same_key_twice_is_refused() -> None:
    engine = SteppedEngine()
    engine.add(fake_request("a", [1]))
    engine.core.add_request(fake_request("a", [2]))
    outputs = engine.core.step()[0]
    assert sorted(output.error_kind or "" for output in outputs) == ["", "invalid_request"]


def test_stop_tokens_end_the_answer_but_not_before_min_tokens() -> None:
    answer = fake_answer([3, 4], 6)
    assert len(set(answer)) == 6
    engine = SteppedEngine()
    engine.add(
        fake_request("stop", [3, 4], 6, sampling={"stop_token_ids": (answer[2],)}),
        fake_request("eos", [3, 4], 6, eos_token_ids=(answer[1],)),
        fake_request("ignore", [3, 4], 6, eos_token_ids=(answer[1],), sampling={"ignore_eos": True}),
        fake_request("early", [3, 4], 6, eos_token_ids=(answer[1], answer[4]), sampling={"min_tokens": 3}),
    )
    engine.run()
    assert engine.tokens("stop#0.0") == answer[:3]
    assert engine.end("stop#0.0").finish_reason is FinishReason.STOP
    assert engine.end("stop#0.0").stop_reason == answer[2]
    assert engine.tokens("eos#0.0") == answer[:2]
    assert engine.end("eos#0.0").finish_reason is FinishReason.STOP
    assert engine.end("eos#0.0").stop_reason is None
    assert engine.tokens("ignore#0.0") == answer
    assert engine.tokens("early#0.0") == answer[:5]


def test_replay_counts_the_delivered_tokens() -> None:
    """A replay's prompt holds the first answer tokens: max_tokens and min_tokens count the whole answer."""
    answer = fake_answer([3, 4], 6)
    engine = SteppedEngine()
    replay = fake_request("a", [3, 4, *answer[:2]], 6, attempt=1, first_index=2, sampling={"min_tokens": 5})
    engine.add(replay)
    scheduled = engine.scheduler.schedule()
    (new,) = scheduled.scheduled_new_reqs
    assert new.sampling_params is not None and new.sampling_params.min_tokens == 5
    assert (new.num_prompt_tokens, len(new.prompt_token_ids)) == (2, 4)
    engine.scheduler.update_from_output(scheduled, engine.executor.execute_model(scheduled))
    engine.run()
    assert engine.outputs["a#0.1"][0].first_index == 3
    assert engine.tokens("a#0.1") == answer[3:]


def test_second_request_finds_the_first_ones_blocks() -> None:
    """B14: num_cached_tokens, and stats in tokens; the last prompt token is always computed."""
    engine = SteppedEngine()
    prompt = list(range(1, 13))
    engine.add(fake_request("a", prompt, max_tokens=2))
    engine.run()
    engine.add(fake_request("b", prompt, max_tokens=2), fake_request("c", prompt, 2, cache_salt="x"))
    engine.run()
    assert [engine.outputs[f"{name}#0.0"][0].num_cached_tokens for name in "abc"] == [0, 8, 0]
    assert engine.tokens("b#0.0") == engine.tokens("a#0.0") == fake_answer(prompt, 2)
    stats = engine.scheduler.make_stats().prefix_cache_stats
    assert (stats.requests, stats.queries, stats.hits, stats.reset) == (3, 36, 8, False)
    assert engine.scheduler.totals.num_cached_tokens == 8


def test_reset_prefix_cache() -> None:
    """B16: refused while requests hold blocks; afterwards nothing is found, and the stats record it."""
    engine = SteppedEngine()
    engine.add(fake_request("a", list(range(1, 13)), max_tokens=2))
    engine.step()
    assert engine.core.call("reset_prefix_cache", []) is False
    engine.run()
    assert engine.core.call("reset_prefix_cache", []) is True
    engine.add(fake_request("b", list(range(1, 13)), max_tokens=2))
    engine.run()
    assert engine.outputs["b#0.0"][0].num_cached_tokens == 0
    assert engine.core.call("stats", [])["prefix_cache_stats"]["reset"] is True


def test_short_pool_preempts_the_youngest_and_no_answer_changes() -> None:
    """B6, B13: the victim comes back with all its tokens and blocks replaced; nothing is lost or repeated."""
    engine = SteppedEngine(kv_cache_bytes=8, enable_prefix_caching=False)
    prompts = {"old": [1, 2, 3, 4, 5, 6], "young": [6, 5, 4, 3, 2, 1]}
    engine.add(*(fake_request(name, prompt, max_tokens=14) for name, prompt in prompts.items()))
    resumed = []
    while engine.core.needs_step():
        scheduled = engine.scheduler.schedule()
        cached = scheduled.scheduled_cached_reqs
        for key, is_resumed, blocks in zip(
            cached.req_ids, cached.resumed_from_preemption, cached.new_block_ids, strict=True
        ):
            if is_resumed:
                resumed.append(key)
                assert blocks[0] == engine.pool.table_of(key)
        output = engine.executor.execute_model(scheduled)
        for said in engine.scheduler.update_from_output(scheduled, output).values():
            for each in said:
                engine.outputs.setdefault(f"{each.request_id}#0.0", []).append(each)
        engine.core.call("check_integrity", [])
    assert "young#0.0" in resumed and "old#0.0" not in resumed
    for name, prompt in prompts.items():
        assert engine.tokens(f"{name}#0.0") == fake_answer(prompt, 14)
    assert engine.scheduler.totals.num_preemptions == len(resumed)


def test_answer_ends_where_the_pool_ends() -> None:
    """No request can wait for more blocks than there are: its length is capped."""
    engine = SteppedEngine(kv_cache_bytes=4)
    engine.add(fake_request("a", [1, 2], max_tokens=100))
    engine.run()
    assert engine.core.info.max_model_len == 12
    assert engine.end("a#0.0").finish_reason is FinishReason.LENGTH
    assert engine.tokens("a#0.0") == fake_answer([1, 2], 10)


def test_nan_logits_end_the_request_and_its_kv_is_not_reused() -> None:
    """B14: corrupted requests are counted."""
    engine = SteppedEngine()
    prompt = [*range(1, 9), NAN_TOKEN]
    engine.add(fake_request("bad", prompt), fake_request("good", [1, 2]))
    engine.run()
    assert engine.end("bad#0.0").error_kind == "internal"
    assert engine.tokens("good#0.0") == fake_answer([1, 2], 4)
    assert engine.scheduler.make_stats().num_corrupted_reqs == 1
    engine.add(fake_request("again", list(range(1, 10))))
    engine.run()
    assert engine.outputs["again#0.0"][0].num_cached_tokens == 0


def test_deadline_ends_a_running_request() -> None:
    engine = SteppedEngine()
    engine.add(fake_request("a", [1, 2], max_tokens=50, deadline_seconds=5.0), fake_request("b", [1], 50))
    engine.step(3)
    assert engine.core.seconds_to_deadline() == 5.0
    engine.now = 5.0
    engine.step()
    end = engine.end("a#0.0")
    assert (end.finish_reason, end.error_kind) == (FinishReason.ERROR, "deadline")
    assert len(engine.tokens("a#0.0")) == 3
    engine.run()
    assert len(engine.tokens("b#0.0")) == 50
    totals = engine.scheduler.totals
    assert (totals.num_requests, totals.num_finished, totals.num_failed) == (2, 1, 1)


def test_deadline_of_an_ended_request_does_not_end_its_namesake() -> None:
    engine = SteppedEngine()
    engine.add(fake_request("a", [1, 2], max_tokens=2, deadline_seconds=10.0))
    engine.run()
    del engine.outputs["a#0.0"]
    engine.now = 8.0
    engine.add(fake_request("a", [1, 2], max_tokens=8, deadline_seconds=100.0))
    engine.step()
    engine.now = 11.0
    engine.run()
    assert engine.tokens("a#0.0") == fake_answer([1, 2], 8)


def test_preempted_request_comes_back_although_kv_for_others_keeps_arriving() -> None:
    """Blocks that become free go to it before a new decode leg may reserve any; else it would wait for ever."""
    engine = SteppedEngine(kv_cache_bytes=9, enable_prefix_caching=False)
    fetches, num_added = engine.connector.fetches, 0
    engine.add(fake_request("victim", [1] * 8, max_tokens=20, transfer=RECEIVE))
    for _ in range(300):
        while len(engine.scheduler.requests) < 5:
            engine.add(fake_request(f"other-{num_added}", [2] * 8, max_tokens=12, transfer=RECEIVE))
            num_added += 1
        for key, fetch in list(fetches.items()):
            if fetch.state == "asked":
                engine.connector.publish_peer(key)
            elif fetch.state == "reading":
                engine.connector.land(key)
        engine.step()
    assert num_added > 20 and engine.scheduler.totals.num_preemptions > 0
    for index in range(num_added - 5):
        assert engine.tokens(f"other-{index}#0.0") == fake_answer([2] * 8, 12)[1:]
    assert engine.tokens("victim#0.0") == fake_answer([1] * 8, 20)[1:]


def test_status_names_and_what_counts_as_finished() -> None:
    """B13: the nine states by the seed's names; finished is a property, not an order."""
    assert [status.name for status in RequestStatus] == [
        "WAITING", "WAITING_FOR_FSM", "WAITING_FOR_REMOTE_KVS", "RUNNING", "PREEMPTED",
        "FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_ABORTED", "FINISHED_IGNORED",
    ]  # fmt: skip
    finished = [status.name for status in RequestStatus if status.is_finished]
    assert finished == [status.name for status in RequestStatus if status.name.startswith("FINISHED_")]


def test_shutdown_aborts_and_closes() -> None:
    """B16: shutdown ends every request and closes both halves of the connector; get_kv_connector gives it."""
    engine = SteppedEngine()
    assert engine.scheduler.get_kv_connector() is engine.connector
    assert SteppedEngine(with_connector=False).scheduler.get_kv_connector() is None
    engine.add(fake_request("a", [1, 2], max_tokens=50))
    engine.step()
    outputs = engine.core.shutdown()
    assert [output.finish_reason for output in outputs[0]] == [FinishReason.ABORT]
    assert engine.connector.is_closed and engine.connector.rank.is_closed and engine.executor.is_shut_down
