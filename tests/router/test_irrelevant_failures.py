"""Failures that do not matter to an answer, and failures of the router itself."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from contract.errors import (
    KvbatonError,
    OverloadedError,
    PeerUnreachableError,
    TransferError,
)
from contract.identity import Role
from protos import worker_pb2 as pb
from router.admission.unreachable_pairs import UnreachablePairs
from router.attempts.attempt import Attempt
from router.attempts.attempt_legs import AttemptLegs, Leg
from router.attempts.failures import Failures
from router.attempts.leg_outcome import Failure
from router.routing.legs import DECODE, LEG_KINDS, LegPlan
from tests.descriptors import no_descriptor_left
from tests.fakes.router.script import Script
from tests.router.cluster import running_cluster
from tests.router.test_admission_queue import grant_one
from tests.router.test_ends import TEXT, TOKENS, nothing_is_left
from tests.text.tiny_model import END, byte_ids

REPLAYS = "kvbaton_request_replays_total"


def decode_fails_first(error: KvbatonError, tokens: list[int]) -> Any:
    """The decode leg fails at once; the first token comes later."""

    def script(task: pb.Task) -> Script:
        if task.first_index == 1:
            return Script(tokens=tokens, fail_at=1, error=error)
        return Script(tokens=tokens, token_delay_seconds=0.3)

    return script


@pytest.mark.parametrize(
    "error", [TransferError("not needed"), PeerUnreachableError("cut"), OverloadedError("no room")]
)
@pytest.mark.parametrize(
    ("tokens", "max_tokens"), [(byte_ids(b"abc"), 1), ([END], 5)], ids=["max_tokens", "end"]
)
async def test_a_decode_leg_that_is_not_needed_may_fail(
    error: KvbatonError, tokens: list[int], max_tokens: int
) -> None:
    """P1: the first token is the whole answer, so that an earlier failure of the other leg is irrelevant."""
    async with running_cluster(decode_fails_first(error, tokens)) as cluster:
        status, answer = await cluster.post(TEXT, {"prompt": "x", "max_tokens": max_tokens})
        assert status == 200, answer
        assert answer["usage"]["completion_tokens"] == 1
        assert not any(name.startswith(REPLAYS) for name in await cluster.metrics())
        assert len(cluster.workers["prefill-0"].received.prefills) == 1
        await nothing_is_left(cluster)


async def test_a_decode_worker_that_is_not_needed_may_die() -> None:
    """P1: its death does not end the request if the first token is the whole answer."""

    def script(task: pb.Task) -> Script:
        if task.first_index == 1:
            return Script(tokens=TOKENS, die_at=1)
        return Script(tokens=TOKENS, token_delay_seconds=0.3)

    async with running_cluster(script) as cluster:
        status, _ = await cluster.post(TEXT, {"prompt": "x", "max_tokens": 1})
        assert status == 200
        assert not any(name.startswith(REPLAYS) for name in await cluster.metrics())


async def test_the_first_token_is_delivered_before_a_failure_that_matters() -> None:
    """P1: the replay begins behind it, and nothing is sampled twice."""

    def script(task: pb.Task) -> Script:
        if task.attempt == 0 and task.first_index == 1:
            return Script(tokens=TOKENS, fail_at=1, error=OverloadedError("no room"))
        return Script(tokens=TOKENS, token_delay_seconds=0.1)

    async with running_cluster(script) as cluster:
        status, answer = await cluster.post(TEXT, {"prompt": "x"})
        assert (status, answer["choices"][0]["text"]) == (200, "abcdef")
        assert [call.task.first_index for call in cluster.workers["prefill-0"].received.prefills] == [0, 1]


async def test_an_embedding_does_not_wait_behind_a_decode_bound_queue() -> None:
    """Costly choice: each plan has a lane of its own; the prefill worker is idle."""
    async with running_cluster(Script(tokens=TOKENS, stall_at=1)) as cluster:
        await grant_one(cluster, "decode-0")
        asking = [asyncio.create_task(cluster.post(TEXT, {"prompt": "x"})) for _ in range(3)]
        await cluster.until(lambda state: state["num_in_line"] == 2)
        async with asyncio.timeout(10):
            status, _ = await cluster.post("/v1/embeddings", {"input": "x", "priority": -5})
        assert status == 200
        assert not any(task.done() for task in asking)
        for task in asking:
            task.cancel()


async def test_embeddings_do_not_overtake_an_answer_that_waits_for_the_same_prefill_worker() -> None:
    """Costly choice: the worker that the first one waits for is kept for it."""
    script = Script(tokens=TOKENS, stall_at=0)
    async with running_cluster(script) as cluster:
        await grant_one(cluster, "prefill-0")
        first = asyncio.create_task(cluster.post(TEXT, {"prompt": "x"}))
        prefill = cluster.workers["prefill-0"]
        await prefill.received.wait_for(lambda worker: len(worker.prefills) == 1)
        await cluster.until(lambda state: state["requests"]["waiting_for_first_token"] == 1)
        cluster.script = lambda _: Script(tokens=TOKENS)
        answer = asyncio.create_task(cluster.post(TEXT, {"prompt": "x", "seed": 7}))
        await cluster.until(lambda state: state["num_in_line"] == 1)
        embedding = asyncio.create_task(cluster.post("/v1/embeddings", {"input": "x"}))
        await cluster.until(lambda state: state["num_in_line"] == 2)
        first.cancel()
        await prefill.received.wait_for(lambda worker: len(worker.prefills) == 2 or len(worker.embeds) == 1)
        assert (len(prefill.received.prefills), len(prefill.received.embeds)) == (2, 0)
        assert [status for status, _ in await asyncio.gather(answer, embedding)] == [200, 200]


class _FailedAttempt(Attempt):
    """An attempt that has failed, without a hand-over."""

    def __init__(self, failure: Failure) -> None:
        no_worker: Any = SimpleNamespace(name="w")  # it is not called: the attempt is over
        self.failure = failure
        self.legs = AttemptLegs([Leg(LegPlan(DECODE, "w", 0), LEG_KINDS[DECODE], no_worker)])


def _noted(*errors: KvbatonError) -> Failures:
    failures = Failures(UnreachablePairs(), max_replays=5, max_deaths=3)
    for error in errors:
        failures.note(_FailedAttempt(Failure(error, None, frozenset())), error)  # type: ignore[arg-type]
    return failures


def test_replays_in_a_row_are_spread_over_time() -> None:
    """P2: the first one begins at once, the fifth after seconds: they are not gone in milliseconds."""
    pauses = [_noted(*[OverloadedError("x")] * count).pause_seconds for count in range(6)]
    assert pauses[:2] == [0.0, 0.0]
    assert pauses[2] > 0
    assert pauses == sorted(pauses)
    assert sum(pauses) > 1


async def test_a_router_without_descriptors_starts_requests() -> None:
    """P2: orders are sent on a stream that is open."""
    async with running_cluster(Script(tokens=TOKENS), (Role.AGGREGATED,), max_replays=0) as cluster:
        async with cluster.session.get(cluster.url("/health")):
            pass  # the session's connection is open now
        with no_descriptor_left():
            status, answer = await cluster.post(TEXT, {"prompt": "x"})
        assert status == 200, answer
        assert answer["choices"][0]["text"] == "abcdef"
