"""The legs of a hand-over that end before their time: aborts and refusals, in each state."""

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given

from contract.errors import InternalError
from contract.outputs import FinishReason
from contract.requests import SendTransfer
from engine.scheduling.requests.finish import RequestStatus
from tests.engine_scheduling.stepping import (
    PROMPT,
    RECEIVE,
    SEND,
    SteppedEngine,
    both_policies,
    fake_request,
    receiving,
)


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_abort_of_a_prefill_leg(num_steps: int) -> None:
    """B12: before its first step it lends nothing; afterwards it is abandoned, and leased until its last read ends."""
    engine = SteppedEngine(max_num_batched_tokens=4)
    engine.add(fake_request("p", PROMPT, transfer=SEND))
    engine.step(num_steps)
    engine.core.abort(["p#0.0"])
    engine.run()
    assert engine.end("p#0.0").finish_reason is FinishReason.ABORT
    if num_steps:
        assert engine.connector.sends["p#0.0"].end == "cancelled"
        assert engine.pool.holders() == {"lease:p#0.0": 3}
        engine.connector.end_lease("p#0.0")
        engine.run()
    assert engine.pool.holders() == {} and not engine.connector.sends


@pytest.mark.parametrize(("max_tokens", "num_shown"), [(1, 0), (2, 4)])
def test_an_answer_of_one_token_is_never_shown_to_the_receiver(max_tokens: int, num_shown: int) -> None:
    """Its transfer is opened, so that the receiver learns that it is not needed; nothing is published that it might read."""
    engine = SteppedEngine(max_num_batched_tokens=4)
    engine.add(fake_request("p", PROMPT, max_tokens, transfer=SEND))
    engine.step()
    send = engine.connector.sends["p#0.0"]
    assert send.num_published == num_shown
    engine.run()
    assert send.end == ("not_needed" if max_tokens == 1 else "finished")


@pytest.mark.parametrize(
    ("max_tokens", "first_index", "max_model_len", "is_needed"),
    [
        (1, 0, 64, False),
        (2, 0, 64, True),
        (5, 4, 64, False),
        (5, 3, 64, True),
        (9, 0, 11, False),
        (9, 0, 12, True),
    ],
)
def test_cached_blocks_that_are_not_needed_are_not_published(
    max_tokens: int, first_index: int, max_model_len: int, is_needed: bool
) -> None:
    """P1: one token was asked for, one is left for a replay, or the model is full: computed or cached, nothing is lent."""
    engine = SteppedEngine(max_num_batched_tokens=4, max_model_len=max_model_len)
    engine.add(fake_request("before", PROMPT, 1))
    engine.run()
    engine.add(fake_request("p", PROMPT, max_tokens, transfer=SEND, first_index=first_index))
    engine.step()
    send = engine.connector.sends["p#0.0"]
    assert (send.num_published > 0) is is_needed
    engine.run()
    assert send.end == ("finished" if is_needed else "not_needed")


@given(
    max_tokens=st.integers(1, 4),
    first_index=st.integers(0, 3),
    num_choices=st.integers(1, 3),
    num_prompt_tokens=st.integers(4, 14),
    is_cached=st.booleans(),
)
def test_what_is_shown_is_needed_and_what_is_needed_is_shown(
    max_tokens: int, first_index: int, num_choices: int, num_prompt_tokens: int, is_cached: bool
) -> None:
    """P1: whatever the prompt, the cache, the choices and the tokens that were delivered."""
    assume(first_index < max_tokens and (num_choices == 1 or first_index == 0))
    engine = SteppedEngine(max_num_batched_tokens=4, max_model_len=16)
    prompt = list(range(1, num_prompt_tokens + 1))
    if is_cached:
        engine.add(fake_request("before", prompt, 1))
        engine.run()
    engine.add(
        fake_request("p", prompt, max_tokens, transfer=SEND, first_index=first_index, num_choices=num_choices)
    )
    engine.step()
    send, num_shown = engine.connector.sends["p#0.0"], 0
    for _ in range(20):
        num_shown = max(num_shown, send.num_published)
        engine.step()
    assert (num_shown > 0) is (send.end == "finished")


@pytest.mark.parametrize("num_steps", [0, 20])
def test_a_transfer_serves_one_request_at_a_time(num_steps: int) -> None:
    """The second is refused while the first waits, and while it has ended and lends; a later attempt is not."""
    engine = SteppedEngine()
    same = SendTransfer("same")
    engine.add(fake_request("a", PROMPT, transfer=same))
    engine.step(num_steps)
    engine.add(fake_request("b", PROMPT, transfer=same))
    engine.add(fake_request("c", PROMPT, transfer=same, attempt=1))
    engine.run()
    assert "transfer same (attempt 0) is here already" in (engine.end("b#0.0").error_message or "")
    assert sorted(engine.connector.sends) == ["a#0.0", "c#0.1"]


@both_policies
def test_a_fetch_that_the_connector_refuses_is_one_error() -> None:
    """A9: the request ends with the connector's error; others, and the same key later, go on."""
    engine = SteppedEngine()
    refuse = InternalError("transfer t is being fetched already")
    engine.connector.refusal = refuse
    engine.add(fake_request("d", PROMPT, transfer=RECEIVE))
    engine.connector.refusal = None
    engine.run()
    assert engine.end("d#0.0").error_message == refuse.message
    del engine.outputs["d#0.0"]
    engine.add(fake_request("d", PROMPT, transfer=RECEIVE))
    assert engine.scheduler.requests["d#0.0"].status is RequestStatus.WAITING_FOR_REMOTE_KVS


@both_policies
def test_abort_after_the_first_token_ends_the_lease() -> None:
    """B12: the prefill leg has ended, its blocks are still lent; an abort of a later attempt's request spares them."""
    engine = SteppedEngine()
    engine.add(fake_request("p", PROMPT, transfer=SEND, attempt=1))
    engine.run()
    engine.core.scheduler.abort_request("p", 0)
    engine.core.scheduler.abort_request("other", None)
    assert engine.connector.sends["p#0.1"].end == "finished"
    engine.core.scheduler.abort_request("p", 1)
    assert engine.connector.sends["p#0.1"].end == "cancelled"
    engine.connector.end_lease("p#0.1")
    engine.run()
    assert engine.pool.holders() == {}


@both_policies
@pytest.mark.parametrize("state", ["asked", "published", "reading", "landed", "waiting", "running"])
def test_abort_of_a_decode_leg(state: str) -> None:
    """B12: in every state of the remote wait and after it; blocks of a read that goes on are quarantined."""
    engine = SteppedEngine(max_num_seqs=1)
    if state == "waiting":
        engine.add(fake_request("other", [1], 30))
        engine.step()
    key = receiving(engine)
    if state != "asked":
        engine.connector.publish_peer(key)
    if state not in ("asked", "published"):
        engine.step()
    if state in ("landed", "waiting", "running"):
        engine.connector.land(key)
    engine.step({"waiting": 1, "running": 2}.get(state, 0))
    if state in ("waiting", "running"):
        assert engine.scheduler.requests[key].status.name == state.upper()
    else:
        assert engine.connector.fetches[key].state == state
    engine.core.abort([key, "other#0.0"])
    engine.run()
    assert engine.end(key).finish_reason is FinishReason.ABORT
    assert engine.pool.count_by_state()["quarantined"] == (3 if state == "reading" else 0)
    if state == "reading":
        engine.connector.drain(key)
        engine.run()
    assert engine.pool.num_free_blocks == engine.pool.num_usable_blocks and engine.connector.fetches == {}
