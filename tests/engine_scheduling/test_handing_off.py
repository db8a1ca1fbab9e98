"""A request that decodes is handed off: its KV becomes a lease of the attempt that continues it, at any token."""

import itertools
import math
from typing import Any

import pytest

from contract.errors import DeadlineError, InvalidRequestError, NotFoundError
from contract.requests import HandOff
from engine.hosting.messages import AddRequest, Call, CallResult, FromEngine, Shutdown, StepOutputs
from engine.mailbox import Mailbox
from engine.stepping.loop import Inbox, StepLoop
from tests.engine_scheduling.stepping import (
    PROMPT,
    RECEIVE,
    SEND,
    SteppedEngine,
    arrive,
    fake_request,
    receiving,
)
from tests.engine_scheduling.test_window_machine import config_of
from tests.fakes.engine.fakes import fake_answer

NUM_TOKENS = 12


def order_of(request_id: str, attempt: int = 0, choice: int = 0, **changes: Any) -> HandOff:
    fields = {"transfer_id": f"moved-{request_id}.{choice}", "next_attempt": attempt + 1, **changes}
    return HandOff(request_id=request_id, attempt=attempt, choice=choice, **fields)


def continued(order: HandOff, delivered: list[int], max_tokens: int = NUM_TOKENS) -> Any:
    """Return the request that another engine continues with."""
    return fake_request(
        order.request_id,
        [*PROMPT, *delivered[:-1]],
        max_tokens,
        transfer=RECEIVE,
        attempt=order.next_attempt,
        choice=order.choice,
        first_index=len(delivered),
    )


@pytest.mark.parametrize("num_emitted", range(1, NUM_TOKENS - 1))
def test_any_number_of_tokens_continues_elsewhere_as_if_nothing_had_happened(num_emitted: int) -> None:
    """Nothing is computed for it: the lease has the KV of all tokens but the newest, with which the transfer finishes."""
    source, target = SteppedEngine(), SteppedEngine()
    source.add(fake_request("r", PROMPT, NUM_TOKENS))
    source.step(num_emitted, starts_early=False)
    order = order_of("r")
    source.hand_off(order)
    end = source.end("r#0.0")
    tokens = source.tokens("r#0.0")
    assert tokens == fake_answer(PROMPT, num_emitted)
    assert (end.handed_over, end.finish_reason, end.first_index) == (True, None, num_emitted)
    num_computed = source.scheduler.totals.num_prefill_tokens
    source.run()
    assert source.scheduler.totals.num_prefill_tokens == num_computed == len(PROMPT)
    send = source.connector.sends["r#0.1"]
    assert (send.end, send.num_published) == ("finished", len(PROMPT) + num_emitted - 1)
    assert [token.token_id for token in send.first_tokens] == tokens[-1:]
    assert list(source.pool.holders()) == ["lease:r#0.1"]

    target.add(continued(order, tokens))
    arrive(target, "r#0.1")
    target.run()
    assert [*tokens, *target.tokens("r#0.1")] == fake_answer(PROMPT, NUM_TOKENS)
    assert target.scheduler.totals.num_prefill_tokens == 0
    source.connector.end_lease("r#0.1")
    source.run()
    assert source.pool.holders() == target.pool.holders() == {}


def test_a_request_that_was_received_is_handed_off_again() -> None:
    """From engine to engine, after each token: each has received what the one before has received and computed."""
    tokens = fake_answer(PROMPT, 1)
    for attempt in itertools.count():
        engine = SteppedEngine()
        before = order_of("r", attempt - 1)
        engine.add(continued(before, tokens))
        key = f"r#0.{attempt}"
        arrive(engine, key)
        engine.step(starts_early=False)
        tokens = [*tokens, *engine.tokens(key)]
        if len(tokens) >= NUM_TOKENS - 1:
            break
        engine.hand_off(order_of("r", attempt))
        assert engine.end(key).handed_over
        engine.run()
        assert engine.connector.sends[f"r#0.{attempt + 1}"].num_published == len(PROMPT) + len(tokens) - 1
    assert attempt > 3 and tokens == fake_answer(PROMPT, len(tokens))


def test_choices_are_handed_off_one_by_one() -> None:
    """They share the blocks of their prompt, which are lent more than once and freed with the last lease."""
    engine = SteppedEngine()
    engine.add(fake_request("r", PROMPT, NUM_TOKENS, num_choices=3))
    engine.step(4, starts_early=False)
    for num_emitted, choice in ((4, 1), (5, 0)):
        engine.hand_off(order_of("r", choice=choice))
        engine.step(starts_early=False)
        assert engine.connector.sends[f"r#{choice}.1"].num_published == len(PROMPT) + num_emitted - 1
        assert engine.tokens(f"r#{choice}.0") == fake_answer(PROMPT, num_emitted, choice)
    engine.run()
    assert engine.tokens("r#2.0") == fake_answer(PROMPT, NUM_TOKENS, 2)
    for choice in (0, 1):
        engine.connector.end_lease(f"r#{choice}.1")
    engine.run()
    assert engine.pool.holders() == {}


def steps_with_interruption(engine: SteppedEngine) -> None:
    engine.step(meanwhile=engine.executor.interrupt, starts_early=False)


def test_a_step_that_was_interrupted_does_not_count() -> None:
    engine = SteppedEngine()
    engine.add(fake_request("r", PROMPT, NUM_TOKENS))
    engine.step(3, starts_early=False)
    steps_with_interruption(engine)
    engine.hand_off(order_of("r"))
    engine.run()
    assert engine.connector.sends["r#0.1"].num_published == len(PROMPT) + 2


@pytest.mark.parametrize("is_ordered", [False, True], ids=["before its orders", "after"])
@pytest.mark.parametrize("attempt", [None, 1])
def test_a_cancel_of_the_next_attempt_ends_the_lease(is_ordered: bool, attempt: int | None) -> None:
    engine = SteppedEngine()
    engine.add(fake_request("r", PROMPT, NUM_TOKENS))
    engine.step(3, starts_early=False)
    engine.hand_off(order_of("r"))
    if is_ordered:
        engine.run()
    engine.core.scheduler.abort_request("r", 0)
    assert list(engine.scheduler.remote_kv.sender.leases) == ["r#0.1"] and "r#0.1" in engine.connector.sends
    engine.core.scheduler.abort_request("r", attempt, 0)
    assert engine.connector.sends["r#0.1"].end == "cancelled"
    engine.run()
    engine.connector.end_lease("r#0.1")
    engine.run()
    assert engine.pool.holders() == {}


def test_what_cannot_be_handed_off_goes_on() -> None:
    """Each is left exactly as it was."""
    engine = SteppedEngine(max_num_batched_tokens=4, max_num_seqs=2)
    engine.add(fake_request("r", PROMPT, 3))
    with pytest.raises(InvalidRequestError, match="waiting"):
        engine.hand_off(order_of("r"))
    engine.step(starts_early=False)
    with pytest.raises(InvalidRequestError, match="6 tokens to compute"):
        engine.hand_off(order_of("r"))
    engine.step(2, starts_early=False)
    assert len(engine.tokens("r#0.0")) == 1
    engine.step(starts_early=False)
    with pytest.raises(InvalidRequestError, match="one token of it is left"):
        engine.hand_off(order_of("r"))
    engine.run()
    assert engine.tokens("r#0.0") == fake_answer(PROMPT, 3)
    with pytest.raises(NotFoundError, match=r"r#0\.0 is not here"):
        engine.hand_off(order_of("r"))
    fetching = receiving(engine)
    with pytest.raises(InvalidRequestError, match="waiting_for_remote_kvs"):
        engine.hand_off(order_of("d"))
    engine.add(fake_request("p", PROMPT, transfer=SEND))
    with pytest.raises(InvalidRequestError, match="a prefill leg"):
        engine.hand_off(order_of("p"))
    arrive(engine, fetching)
    engine.run()
    assert engine.end(fetching).finish_reason == "length" and engine.end("p#0.0").finish_reason is None


def test_an_order_that_comes_too_late_or_names_what_is_in_use_is_refused() -> None:
    engine = SteppedEngine()
    engine.add(fake_request("r", PROMPT, NUM_TOKENS), fake_request("r", PROMPT, NUM_TOKENS, attempt=2))
    engine.step(3, starts_early=False)
    engine.now = 5.5
    with pytest.raises(DeadlineError, match=r"1\.500 s too late"):
        engine.hand_off(order_of("r"), expires=4.0)
    with pytest.raises(InvalidRequestError, match="here already"):
        engine.hand_off(order_of("r", next_attempt=2))
    engine.hand_off(order_of("r"), expires=6.0)
    with pytest.raises(InvalidRequestError, match="here already"):
        engine.hand_off(order_of("r", attempt=2, next_attempt=1))
    engine.run()
    assert engine.tokens("r#0.2") == fake_answer(PROMPT, NUM_TOKENS)


def test_an_engine_without_a_connector_refuses() -> None:
    engine = SteppedEngine(with_connector=False)
    engine.add(fake_request("r", PROMPT, NUM_TOKENS))
    engine.step(3, starts_early=False)
    with pytest.raises(InvalidRequestError, match="no connector"):
        engine.hand_off(order_of("r"))
    engine.run()
    assert engine.tokens("r#0.0") == fake_answer(PROMPT, NUM_TOKENS)


def test_kv_of_another_precision_stays() -> None:
    """Law 7: the receiver would find it under the hashes of KV that this engine computes."""
    engine = SteppedEngine()
    key = receiving(engine)
    engine.scheduler.requests[key].hash_from("model@bfloat16")
    arrive(engine, key)
    engine.step(starts_early=False)
    with pytest.raises(InvalidRequestError, match="another precision"):
        engine.hand_off(order_of("d"))


def test_the_last_output_is_sent_before_the_next_step() -> None:
    """It does not wait for the results of a step: it comes right behind the tokens before it."""
    engine = SteppedEngine()
    inbox: Inbox = Mailbox()
    emitted: list[FromEngine] = []
    inbox.put(AddRequest(fake_request("r", PROMPT, NUM_TOKENS)))
    inbox.put(AddRequest(fake_request("other", PROMPT, NUM_TOKENS)))
    loop = StepLoop(engine.core, inbox, {0: emitted.append}, idle_seconds=600.0)
    begin = engine.executor.begin
    steps: list[int] = []

    def counted(scheduled: Any) -> Any:
        steps.append(len(emitted))
        if len(steps) == 4:
            inbox.put(Call(7, "hand_off", [_plain(order_of("r")), math.inf]))
        if len(steps) == 6:
            inbox.put(Shutdown())
        return begin(scheduled)

    engine.executor.begin = counted  # type: ignore[method-assign]
    loop.run()
    result = next(index for index, each in enumerate(emitted) if isinstance(each, CallResult))
    assert steps[4] == result + 3, "the tokens of the last step and the end follow, then the next step begins"
    last, urgent = emitted[result + 1 : result + 3]
    assert isinstance(last, StepOutputs) and isinstance(urgent, StepOutputs)
    assert [len(output.token_ids) for output in last.outputs] == [1, 1]
    assert [(o.request_id, o.first_index, o.handed_over) for o in urgent.outputs] == [("r", 4, True)]


def _plain(order: HandOff) -> dict[str, Any]:
    return {name: getattr(order, name) for name in order.__struct_fields__}


def test_a_block_without_its_first_tokens_is_not_lent_on() -> None:
    """Nor is it found. With a window of 5 the token at 9 sees from 5 on, amid block 1; that at 12 from behind it."""
    engine = SteppedEngine(cache=config_of({None: 20, 5: 12}))
    engine.connector.lacks_heads = True
    prompt = list(range(1, 10))
    engine.add(fake_request("r", prompt, NUM_TOKENS, transfer=RECEIVE))
    arrive(engine, "r#0.0")
    request = engine.scheduler.requests["r#0.0"]
    full, window = engine.scheduler.pools.pools
    assert len(full.find_cached(request.block_hashes)) == 2
    assert window.find_each_cached(request.block_hashes) == [0, 0]
    num_refused = 0
    while request.num_computed_tokens < 12:
        with pytest.raises(InvalidRequestError, match="a worker with smaller blocks has sent a part"):
            engine.hand_off(order_of("r"))
        num_refused += 1
        engine.step(starts_early=False)
    assert num_refused > 0
    engine.hand_off(order_of("r"))
    assert engine.end("r#0.0").handed_over
