"""Pairs of workers that can never hand KV over: the router learns it once, plans around them, and shows them."""

import logging
from typing import Any

import pytest

from contract.errors import IncompatiblePeerError, KvbatonError, PeerUnreachableError, TransferError
from contract.identity import Role
from protos import worker_pb2 as pb
from router.admission.unreachable_pairs import FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS, UnreachablePairs
from tests.clock import Clock
from tests.fakes.router.script import Script
from tests.router.cluster import Cluster, running_cluster
from tests.router.test_ends import TOKENS, nothing_is_left
from tests.router.test_unreachable_pairs import ANSWER, D, P, ask, attached

NO_TRANSPORT = IncompatiblePeerError("the peer lends over shm, this worker reads over tcp")
TORN = TransferError("a block is damaged in every read")
CUT = PeerUnreachableError("the control link is cut")
FAILED = 'kvbaton_failed_pairs{kind="%s"}'
RECOMPUTED = 'kvbaton_recomputed_prompts_total{reason="%s"}'
TOKENS_AGAIN = 'kvbaton_recomputed_prompt_tokens_total{reason="%s"}'


def failing(error: KvbatonError) -> Any:
    """Return a script that lets every decode leg behind a hand-over fail."""

    def script(task: pb.Task) -> Script:
        is_fetching = task.first_index == len(task.prompt_token_ids)
        return Script(tokens=TOKENS, fail_at=task.first_index if is_fetching else None, error=error)

    return script


async def admin_facts(cluster: Cluster) -> dict[str, Any]:
    async with cluster.session.get(f"http://{cluster.service.addresses.admin}/admin/workers") as response:
        return dict(await response.json())


@pytest.mark.parametrize(("error", "num_tries"), [(NO_TRANSPORT, 1), (CUT, 1), (TORN, 2)])
async def test_a_pair_that_never_hands_over_costs_one_request_and_is_shown(
    error: KvbatonError, num_tries: int, caplog: pytest.LogCaptureFixture
) -> None:
    """B2: before, each prompt was computed three times, for ever, with 200 and a good health."""
    caplog.set_level(logging.INFO)
    async with running_cluster(failing(error)) as cluster:
        assert (await cluster.get("/health")) == (200, {"status": "ok"})
        assert [await ask(cluster) for _ in range(6)] == [(200, ANSWER)] * 6
        assert len(cluster.workers["prefill-0"].received.prefills) == num_tries
        sources = [call.HasField("source") for call in cluster.workers["decode-0"].received.decodes]
        assert sources == [*[True] * num_tries, *[False] * 6]
        status, health = await cluster.get("/health")
        assert (status, health["status"]) == (200, "degraded")
        assert health["reason"].startswith("1 pair of workers cannot hand KV over")
        facts = await admin_facts(cluster)
        (pair,) = facts["failed_pairs"]
        assert (pair["prefill"], pair["decode"], pair["kind"]) == ("prefill-0", "decode-0", error.kind.value)
        assert error.message in pair["message"]
        assert [worker["num_failed_pairs"] for worker in facts["workers"]] == [1, 1]
        metrics = await cluster.metrics()
        assert metrics[FAILED % error.kind.value] == 1
        assert metrics[RECOMPUTED % "local"] == 6
        assert metrics[TOKENS_AGAIN % "local"] >= 6
        assert metrics[RECOMPUTED % "replay"] == num_tries - 1
        await nothing_is_left(cluster)
    told = [record for record in caplog.records if "cannot hand KV over to worker" in record.getMessage()]
    assert len(told) == 1


async def test_a_worker_that_starts_anew_ends_it() -> None:
    async with running_cluster(failing(NO_TRANSPORT)) as cluster:
        assert await ask(cluster) == (200, ANSWER)
        await cluster.workers["decode-0"].stop()
        await cluster.until(lambda state: len(state["workers"]) == 1)
        cluster.script = lambda _: Script(tokens=TOKENS)
        again = await cluster.add(Role.DECODE, "decode-0")
        assert (await cluster.get("/health")) == (200, {"status": "ok"})
        assert await ask(cluster) == (200, ANSWER)
        assert [call.HasField("source") for call in again.received.decodes] == [True]
        assert (await cluster.metrics())[FAILED % "incompatible"] == 0


async def test_another_pair_takes_over_from_an_incompatible_one() -> None:
    async with running_cluster(Script(tokens=TOKENS)) as cluster:
        bad = await cluster.add(D, "decode-1")
        bad.player.script = failing(NO_TRANSPORT)
        assert [await ask(cluster) for _ in range(12)] == [(200, ANSWER)] * 12
        assert len(bad.received.decodes) <= 1
        good = cluster.workers["decode-0"].received.decodes
        assert all(call.HasField("source") for call in good)
        assert (await cluster.metrics())[RECOMPUTED % "local"] == 0


def test_an_incompatible_pair_is_not_tried_again() -> None:
    clock = Clock()
    pairs, p, d = UnreachablePairs(clock), attached(P, "p"), attached(D, "d")
    pairs.record_failure(p, d, NO_TRANSPORT)
    clock.now += 1e6
    assert pairs.blocked([p, d]) == frozenset({("p", "d")})
    pairs.record_probe(p, d)
    clock.now += 1e6
    assert pairs.blocked([p, d]) == frozenset({("p", "d")})
    (shown,) = pairs.facts([p, d])
    assert (shown["kind"], shown["seconds"]) == ("incompatible", 2e6)
    assert pairs.facts([p, attached(D, "d")]) == []


def test_one_failed_transfer_is_bad_luck_and_two_in_a_row_are_not() -> None:
    clock = Clock()
    pairs, p, d = UnreachablePairs(clock), attached(P, "p"), attached(D, "d")
    for _ in range(5):
        pairs.record_failure(p, d, TORN)
        assert pairs.failed([p, d]) == []
        pairs.record_success(p, d)
    pairs.record_failure(p, d, TORN)
    pairs.record_failure(p, d, TORN)
    assert pairs.blocked([p, d]) == frozenset({("p", "d")})
    pause = FIRST_PAUSE_SECONDS
    for _ in range(8):
        clock.now += pause
        assert pairs.blocked([p, d]) == frozenset()
        pairs.record_probe(p, d)
        pairs.record_failure(p, d, TORN)
        pause = min(2 * pause, LAST_PAUSE_SECONDS)
        assert pairs.blocked([p, d]) == frozenset({("p", "d")})
    pairs.record_success(p, d)
    assert pairs.failed([p, d]) == []


def test_failures_of_workers_that_are_gone_are_forgotten() -> None:
    pairs, p, d = UnreachablePairs(Clock()), attached(P, "p"), attached(D, "d")
    pairs.record_failure(p, d, TORN)
    assert pairs.failed([p]) == []
    pairs.record_failure(p, d, TORN)
    assert pairs.failed([p, d]) == [], "the first failure was forgotten with its worker"
