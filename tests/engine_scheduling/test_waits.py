"""Every waiting state has a deadline and a way out (law 4): one test for each row of the table in the documentation."""

from typing import Any

import pytest

from contract.outputs import EngineOutput
from engine.connector import FirstToken, Received
from engine.scheduling.requests.finish import RequestStatus
from tests.engine_scheduling.stepping import (
    PROMPT,
    RECEIVE,
    SEND,
    SteppedEngine,
    arrive,
    fake_request,
)
from tests.fakes.engine.fakes import FAKE_VOCAB_SIZE
from tests.fakes.engine.transfer import FakeConnector

OWN = 50.0


def reach(state: str, **changes: Any) -> tuple[SteppedEngine, str]:
    """An engine with a request ``r`` in this state, whose own deadline is OWN seconds, and its key."""
    engine = SteppedEngine(kv_cache_bytes=7, max_num_seqs=2, enable_prefix_caching=False, **changes)
    if state in ("waiting", "arrived"):
        engine.add(*(fake_request(name, [9], max_tokens=9) for name in ("one", "two")))
    elif state in ("preempted", "published"):
        engine.add(fake_request("one", [9] * 11, max_tokens=13))
    engine.step()
    is_remote = state in ("asked", "published", "reading", "arrived")
    transfer = RECEIVE if is_remote else SEND if state == "chunking" else None
    max_tokens = 2 if state == "published" else 15
    prompt = PROMPT * 2 if state == "published" else PROMPT
    engine.add(fake_request("r", prompt, max_tokens, transfer=transfer, deadline_seconds=OWN))
    key = "r#0.0"
    if state in ("published", "reading"):
        engine.connector.publish_peer(key)
    if state == "arrived":
        arrive(engine, key)
    if state in ("chunking", "running", "reading", "published"):
        engine.step()
    while state == "preempted" and engine.scheduler.requests[key].status is not RequestStatus.PREEMPTED:
        engine.step()
    return engine, key


EXPECTED = {
    "waiting": "WAITING",
    "arrived": "WAITING",
    "chunking": "RUNNING",
    "running": "RUNNING",
    "preempted": "PREEMPTED",
    "asked": "WAITING_FOR_REMOTE_KVS",
    "published": "WAITING_FOR_REMOTE_KVS",
    "reading": "WAITING_FOR_REMOTE_KVS",
}


@pytest.mark.parametrize("state", EXPECTED)
def test_own_deadline_in_every_state(state: str) -> None:
    """The deadline that came with the request ends it wherever it is, once, and names the state."""
    engine, key = reach(state, max_num_batched_tokens=4 if state == "chunking" else 32)
    assert engine.scheduler.requests[key].status.name == EXPECTED[state]
    engine.now = OWN
    assert engine.core.seconds_to_deadline() == 0.0
    engine.step()
    end = engine.end(key)
    assert end.error_kind == "deadline" and EXPECTED[state].lower() in (end.error_message or "")
    assert key not in engine.scheduler.requests
    wind_up(engine)


@pytest.mark.parametrize("state", ["asked", "published", "reading"])
def test_wait_for_remote_kv_has_a_deadline_of_its_own(state: str) -> None:
    """Shorter than the request's: whether the sender is silent, or the blocks do not suffice, or a read hangs."""
    engine, key = reach(state, remote_kv_timeout_seconds=5.0)
    assert engine.scheduler.requests[key].status is RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.now = 5.0
    engine.step()
    assert engine.end(key).error_kind == "deadline"
    assert engine.pool.count_by_state()["quarantined"] == (3 if state == "reading" else 0)
    wind_up(engine)


def test_quarantined_blocks_hold_up_only_those_that_need_them() -> None:
    """They come back when the read is terminal (``Drained``); the request itself was answered long before."""
    engine, key = reach("reading", remote_kv_timeout_seconds=5.0)
    engine.now = 5.0
    engine.step()
    assert engine.end(key).error_kind == "deadline"
    engine.add(fake_request("small", [1] * 6, max_tokens=4), fake_request("big", [1] * 20, max_tokens=1))
    engine.run()
    assert len(engine.tokens("small#0.0")) == 4 and "big#0.0" not in engine.outputs
    wind_up(engine)
    assert len(engine.tokens("big#0.0")) == 1


def test_blocks_of_a_finished_prefill_leg_come_back_with_the_end_of_its_lease() -> None:
    """The connector bounds the lease; who waits for the blocks meanwhile has its own deadline."""
    engine = SteppedEngine(kv_cache_bytes=7, enable_prefix_caching=False)
    engine.add(fake_request("p", PROMPT, transfer=SEND))
    engine.run()
    engine.add(
        fake_request("late", [1] * 16, 1, deadline_seconds=5.0), fake_request("next", [1] * 16, max_tokens=1)
    )
    engine.run()
    engine.now = 5.0
    engine.step()
    assert engine.end("late#0.0").error_kind == "deadline" and "next#0.0" not in engine.outputs
    wind_up(engine)
    assert len(engine.tokens("next#0.0")) == 1


def wind_up(engine: SteppedEngine) -> None:
    """The connector does what it owes: reads become terminal, leases end. Then nothing is held."""
    for key, fetch in list(engine.connector.fetches.items()):
        if fetch.state == "draining":
            engine.connector.drain(key)
    for key in [key for key, send in engine.connector.sends.items() if send.end]:
        engine.connector.end_lease(key)
    engine.run()
    assert engine.scheduler.requests == {}
    assert engine.pool.num_free_blocks == engine.pool.num_usable_blocks


class BadPeer(FakeConnector):
    """Everything arrives and is verified, but with first tokens that the test sets."""

    first_tokens: list[FirstToken]

    def pop_received(self, request_id: str) -> Received:
        """See SchedulerConnector."""
        received = super().pop_received(request_id)
        return Received(self.first_tokens, received.report)


@pytest.mark.parametrize("token", [FAKE_VOCAB_SIZE, -1, 2**40, None])
def test_first_token_outside_the_vocabulary_fails_the_transfer(token: int | None) -> None:
    """It must not reach the model: one clear error, the blocks are free, and their content is not found again."""
    connector = BadPeer()
    connector.first_tokens = [] if token is None else [FirstToken(token)]
    engine = SteppedEngine(connector=connector)
    engine.add(fake_request("d", PROMPT, transfer=RECEIVE))
    arrive(engine, "d#0.0")
    end: EngineOutput = engine.end("d#0.0")
    assert (end.error_kind, end.token_ids) == ("transfer_failed", [])
    assert ("with 0 first tokens" if token is None else f"token id {token}") in (end.error_message or "")
    wind_up(engine)
    engine.add(fake_request("again", PROMPT, max_tokens=1))
    engine.run()
    assert engine.outputs["again#0.0"][0].num_cached_tokens == 0
