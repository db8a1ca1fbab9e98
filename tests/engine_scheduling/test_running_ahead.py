"""Steps that are decided while the one before is computed: no answer changes, and nothing is sent behind an end."""

from random import Random
from typing import Any

import pytest

from contract.outputs import FinishReason
from engine.outputs import SchedulerOutput
from tests.engine_scheduling.stepping import (
    RECEIVE,
    SEND,
    SteppedEngine,
    arrive,
    both_policies,
    fake_request,
    receiving,
)
from tests.engine_scheduling.test_next_step import Watched, scarce
from tests.fakes.engine.fakes import NAN_TOKEN, fake_answer


def ahead(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Watched:
    """Return an engine whose steps run ahead, and whose orders are recorded."""
    watched = Watched(monkeypatch, is_prepared=True, starts_early=True, **changes)
    watched.engine.executor.runs_ahead = True
    return watched


def rows(orders: list[SchedulerOutput]) -> list[list[str]]:
    return [[key.partition("#")[0] for key in order.num_scheduled_tokens] for order in orders]


@both_policies
@pytest.mark.parametrize("max_num_seqs", [3, 8])
@pytest.mark.parametrize("num_blocks", [24, 64])
def test_no_answer_changes(monkeypatch: pytest.MonkeyPatch, num_blocks: int, max_num_seqs: int) -> None:
    """Law 6: requests come and go, stop, are preempted and aborted; the KV of each is checked before each pass."""
    changes = scarce(num_blocks, max_num_seqs)
    for seed in range(5):
        plainly = Watched(monkeypatch, is_prepared=False, **changes)
        plainly.live(Random(seed))
        one = ahead(monkeypatch, **changes)
        one.live(Random(seed))
        assert one.engine.num_started_early > 20
        tokens = {key: one.engine.tokens(key) for key in one.engine.outputs}
        for key, own in tokens.items():
            whole = plainly.engine.tokens(key)
            assert own[: len(whole)] == whole[: len(own)], "an abort comes after more or fewer tokens"
            if plainly.engine.end(key).finish_reason is not FinishReason.ABORT:
                assert own == whole and one.engine.end(key).finish_reason
        assert tokens.keys() == plainly.engine.outputs.keys()


@both_policies
def test_what_is_computed_behind_a_stop_is_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 5: a step holds an answer once more that the step before turns out to end; its blocks may be taken at once."""
    one = ahead(monkeypatch)
    stop = {"stop_token_ids": tuple(fake_answer([1, 2, 3], 4)[-1:])}
    one.engine.add(
        fake_request("a", [1, 2, 3], max_tokens=20, sampling=stop), fake_request("b", [4], max_tokens=12)
    )
    one.engine.step(9)
    assert one.engine.tokens("a#0.0") == fake_answer([1, 2, 3], 4)
    assert one.engine.end("a#0.0").finish_reason is FinishReason.STOP
    assert sorted(map(len, rows(one.orders)[:6])) == [1, 2, 2, 2, 2, 2]
    assert rows(one.orders)[5:] == [["b"]] * 4
    assert [sorted(order.finished_req_ids) for order in one.orders[4:7]] == [[], ["a#0.0"], []]


@both_policies
def test_an_answer_is_in_no_step_behind_its_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its length is known beforehand, so nothing is computed in vain, and the others run ahead without it."""
    one = ahead(monkeypatch)
    one.engine.add(fake_request("a", [1, 2, 3], max_tokens=4), fake_request("b", [4], max_tokens=9))
    one.engine.step(9)
    assert sorted(map(len, rows(one.orders))) == [1] * 5 + [2] * 4
    assert one.engine.num_started_early == 8 and not one.engine.core.step_in_flight


@both_policies
def test_no_step_runs_ahead_that_another_request_could_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for a place in the batch, which is free only when another one has ended."""
    one = ahead(monkeypatch, max_num_seqs=1)
    one.engine.add(fake_request("a", [1, 2, 3], max_tokens=6), fake_request("b", [4], max_tokens=6))
    one.engine.step(6)
    assert rows(one.orders) == [["a"]] * 6
    one.engine.step(2)
    assert rows(one.orders)[6:] == [["b"], ["b"]]
    assert one.engine.tokens("b#0.0") == fake_answer([4], 2)


@both_policies
def test_room_that_a_fetch_waits_for_is_given_to_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 4: an answer ends, so a request whose KV another worker has computed gets its blocks in the next step."""
    engine = SteppedEngine(kv_cache_bytes=11)
    engine.executor.runs_ahead = True
    stop = {"stop_token_ids": tuple(fake_answer([1] * 13, 8)[-1:])}
    engine.add(
        fake_request("a", [1] * 13, max_tokens=20, sampling=stop), fake_request("b", [4], max_tokens=12)
    )
    engine.step()
    key = receiving(engine, prompt=[7] * 26, max_tokens=2)
    engine.step()
    engine.connector.publish_peer(key)
    engine.step(8)
    assert len(engine.tokens("a#0.0")) == 8 and len(engine.tokens("b#0.0")) == 10
    assert engine.connector.fetches[key].state == "reading"
    engine.connector.land(key)
    engine.run()
    assert engine.tokens(key) == fake_answer([7] * 26, 2)[1:]
    assert engine.tokens("b#0.0") == fake_answer([4], 12)


@both_policies
def test_legs_that_hand_over_and_embeddings_run_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill leg ends with its one token, and a received request joins at the start of a step."""
    engine = SteppedEngine()
    engine.executor.runs_ahead = True
    engine.add(fake_request("s", [1, 2, 3, 4, 5], transfer=SEND), fake_request("a", [6], max_tokens=30))
    engine.step(3)
    assert engine.tokens("s#0.0") == fake_answer([1, 2, 3, 4, 5], 1)
    engine.add(fake_request("d", [1, 2], max_tokens=6, transfer=RECEIVE))
    engine.step()
    arrive(engine, "d#0.0")
    engine.add(fake_request("n", [8, 9], max_tokens=5, num_choices=3))
    engine.run()
    assert engine.tokens("d#0.0") == fake_answer([1, 2], 6)[1:]
    assert engine.tokens("n#2.0") == fake_answer([8, 9], 5, choice=2)
    assert engine.tokens("a#0.0") == fake_answer([6], 30)


@both_policies
def test_an_answer_that_is_not_a_number_ends_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    one = ahead(monkeypatch)
    one.engine.add(fake_request("bad", [1, NAN_TOKEN], max_tokens=9), fake_request("b", [4], max_tokens=9))
    one.engine.step(9)
    assert one.engine.end("bad#0.0").error_kind == "internal" and not one.engine.tokens("bad#0.0")
    assert one.engine.tokens("b#0.0") == fake_answer([4], 9)
