"""The end of replaying, the workers of replays, and failures that cause none."""

import asyncio
import logging
from typing import Any, cast

import pytest

from contract.errors import OverloadedError, TransferError, WorkerLostError
from contract.identity import Role
from contract.membership import Registration
from protos import worker_pb2 as pb
from router.admission.unreachable_pairs import UnreachablePairs
from router.attempts.failures import Failures
from router.attempts.leg_outcome import Failure
from router.workers.worker_calls import open_worker_calls
from serving.cluster_tls import router_tls
from tests.fakes.router.script import Script
from tests.router.cluster import SECRET, running_cluster
from tests.router.test_admission_queue import grant_one
from tests.router.test_ends import TEXT, TOKENS, nothing_is_left
from tests.router.test_irrelevant_failures import _FailedAttempt
from tests.router.test_replay import ANSWER, add_twins, texts

REPLAYS = "kvbaton_request_replays_total"
LOCAL = "kvbaton_request_local_recomputes_total"


def is_fetching(task: pb.Task) -> bool:
    """True for a decode leg behind a hand-over, where the prompt was one token."""
    return bool(task.first_index == len(task.prompt_token_ids))


def fetching_fails(task: pb.Task, **trouble: Any) -> Script:
    """Prefill legs emit their token; every decode leg behind a hand-over fails before its first one."""
    return Script(tokens=TOKENS, **(trouble if is_fetching(task) else {}))


async def test_tokens_of_prefill_legs_do_not_hide_that_handing_over_always_fails() -> None:
    def script(task: pb.Task) -> Script:
        return fetching_fails(task, fail_at=task.first_index, error=TransferError("torn"))

    async with running_cluster(script) as cluster:
        assert "".join(await texts(cluster)) == ANSWER
        decodes = cluster.workers["decode-0"].received.decodes
        assert [call.HasField("source") for call in decodes] == [True, True, False]
        await nothing_is_left(cluster)


async def test_tokens_of_prefill_legs_do_not_prolong_a_request_that_no_decode_worker_survives() -> None:
    def script(task: pb.Task) -> Script:
        return fetching_fails(task, fail_at=task.first_index, error=OverloadedError("no room"))

    async with running_cluster(script, max_replays=2) as cluster:
        status, _ = await cluster.post(TEXT, {"prompt": "x"})
        assert status == 429
        assert len(cluster.workers["decode-0"].received.decodes) == 3
        await nothing_is_left(cluster)


async def test_a_death_that_a_peer_reports_before_the_router_sees_it_costs_one_attempt() -> None:
    """The replay is bound to the dead worker again if there is no other; its end is not counted a second time."""

    def script(task: pb.Task) -> Script:
        legs: dict[tuple[int, bool], dict[str, Any]] = {
            (0, False): {"stall_at": 0},
            (0, True): {"fail_at": 1, "error": WorkerLostError("the link to prefill-0 broke")},
            (1, False): {"die_at": 0},
            (1, True): {"stall_at": 1},
        }
        return Script(tokens=TOKENS, **legs.get((task.attempt, is_fetching(task)), {}))

    async with running_cluster(script, max_replays=1) as cluster:
        assert "".join(await texts(cluster)) == ANSWER
        assert len(cluster.workers["prefill-0"].received.prefills) == 2
        assert len(cluster.workers["decode-0"].received.decodes) == 3
        await nothing_is_left(cluster)


async def test_a_call_that_is_never_answered_does_not_end_a_leg_that_has_emitted_tokens() -> None:
    script = Script(tokens=TOKENS, is_mute=True, token_delay_seconds=0.2)
    async with running_cluster(script, (Role.AGGREGATED,), accept_timeout_seconds=0.5) as cluster:
        assert "".join(await texts(cluster)) == ANSWER
        assert not any(name.startswith(REPLAYS) for name in await cluster.metrics())


async def test_a_leg_that_neither_accepts_nor_emits_is_replayed() -> None:
    def script(task: pb.Task) -> Script:
        return Script(tokens=TOKENS) if task.attempt else Script(tokens=TOKENS, is_mute=True, stall_at=0)

    async with running_cluster(script, (Role.AGGREGATED,), accept_timeout_seconds=0.3) as cluster:
        assert "".join(await texts(cluster)) == ANSWER
        assert (await cluster.metrics())[REPLAYS + '{kind="deadline"}'] == 1
        await nothing_is_left(cluster)


async def test_a_replay_waits_for_room_elsewhere_and_does_not_go_back_to_the_failed_worker() -> None:
    """Its replays would be used up there within milliseconds while a healthy worker is alive."""

    def script(task: pb.Task) -> Script:
        return Script(tokens=TOKENS, stall_at=1) if task.sampling.seed == 1 else bad

    bad = Script(refuse=OverloadedError("no room"))
    good = Script(tokens=TOKENS)
    async with running_cluster(script, (Role.AGGREGATED,)) as cluster:
        await grant_one(cluster, "both-0")
        busy = asyncio.create_task(cluster.post(TEXT, {"prompt": "x", "seed": 1}))
        await cluster.until(lambda state: state["requests"]["streaming"] == 1)
        suspect = await cluster.add(Role.AGGREGATED, "both-1")
        asking = asyncio.create_task(cluster.post(TEXT, {"prompt": "x", "seed": 2}))
        await suspect.received.wait_for(lambda worker: len(worker.decodes) == 1)
        await cluster.until(lambda state: state["num_in_line"] == 1 or asking.done())
        bad = good
        busy.cancel()
        status, answer = await asking
        assert (status, answer["choices"][0]["text"]) == (200, ANSWER)
        assert len(suspect.received.decodes) == 1


async def test_a_worker_that_starts_again_is_not_avoided() -> None:
    """The replay does not wait for room on the other one."""

    def script(task: pb.Task) -> Script:
        is_stuck = task.sampling.seed == 1 or not task.attempt
        return Script(tokens=TOKENS, stall_at=1 if is_stuck else None)

    async with running_cluster(script, (Role.AGGREGATED,)) as cluster:
        await grant_one(cluster, "both-0")
        busy = asyncio.create_task(cluster.post(TEXT, {"prompt": "x", "seed": 1}))
        await cluster.until(lambda state: state["requests"]["streaming"] == 1)
        second = await cluster.add(Role.AGGREGATED, "both-1")
        asking = asyncio.create_task(cluster.post(TEXT, {"prompt": "x", "seed": 2}))
        await cluster.until(lambda state: state["requests"]["streaming"] == 2)
        await second.die()
        await cluster.until(lambda state: state["num_in_line"] == 1)
        await cluster.add(Role.AGGREGATED, "both-1")
        assert (await asking)[0] == 200
        busy.cancel()


async def test_a_replay_on_a_worker_that_is_both_is_no_local_recompute() -> None:
    def script(task: pb.Task) -> Script:
        return Script(tokens=TOKENS, die_at=None if task.attempt else 2)

    async with running_cluster(script, (Role.AGGREGATED,)) as cluster:
        await add_twins(cluster, Role.AGGREGATED)
        assert "".join(await texts(cluster)) == ANSWER
        assert (await cluster.metrics())[LOCAL] == 0


async def test_a_local_recompute_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Law 10: a slower path is counted and logged."""

    def script(task: pb.Task) -> Script:
        return Script(tokens=TOKENS, die_at=0 if task.first_index == task.attempt == 0 else None)

    caplog.set_level(logging.WARNING)
    async with running_cluster(script) as cluster:
        assert "".join(await texts(cluster)) == ANSWER
        assert (await cluster.metrics())[LOCAL] == 1
    assert any(
        "decode worker decode-0 computes the prompt itself" in record.getMessage()
        for record in caplog.records
    )


async def test_a_call_that_comes_after_the_workers_end_is_its_loss() -> None:
    """Between the decision to move an answer and the call the worker may go, and with it the channel."""
    gone = Registration(worker_id="w", address="127.0.0.1:1")
    async with open_worker_calls(gone, router_tls(SECRET), 1.0) as calls:
        pass
    with pytest.raises(WorkerLostError, match="worker w had gone"):
        await calls.hand_off(pb.HandOffRequest())


async def test_a_call_that_the_workers_end_cancels_is_its_loss() -> None:
    """The router closes its channel to a lost worker. That must not look as if the caller's own task were cancelled."""
    async with running_cluster(Script(tokens=TOKENS), (Role.AGGREGATED,)) as cluster:
        worker = cluster.workers["both-0"]
        worker.player.may_hand_off.clear()
        (attached,) = cluster.service._path.registry.workers
        calling = asyncio.create_task(attached.calls.hand_off(pb.HandOffRequest()))
        await worker.received.wait_for(lambda each: bool(each.hand_offs))
        await worker.die()
        with pytest.raises(WorkerLostError, match="had gone before it answered HandOff"):
            await calling


@pytest.mark.parametrize("max_worker_deaths", [1, 3])
async def test_a_request_that_kills_its_workers_after_each_token_ends_after_a_few_deaths(
    max_worker_deaths: int,
) -> None:
    """B8: before, the failures were counted anew with each token, and it went on as long as there were workers."""

    def script(task: pb.Task) -> Script:
        return Script(tokens=TOKENS, die_at=task.first_index + 1, token_delay_seconds=0.05)

    async with running_cluster(script, (Role.AGGREGATED,), max_worker_deaths=max_worker_deaths) as cluster:
        for number in range(1, 6):
            await cluster.add(Role.AGGREGATED, f"both-{number}")
        status, answer = await cluster.post(TEXT, {"prompt": "x"})
        assert status == 503
        text = (
            f"{max_worker_deaths} workers were lost while they computed this request, which may be the cause"
        )
        assert answer["error"]["message"].startswith(text)
        assert sum(worker.is_dead for worker in cluster.workers.values()) == max_worker_deaths


async def test_failures_after_each_token_are_bounded_in_all() -> None:
    """B8: as is every counter that progress resets."""

    def script(task: pb.Task) -> Script:
        return Script(tokens=[97] * 100, fail_at=task.first_index + 1, error=OverloadedError("no room"))

    async with running_cluster(script, (Role.AGGREGATED,), max_replays=1) as cluster:
        status, _ = await cluster.post(TEXT, {"prompt": "x", "max_tokens": 100})
        assert status == 429
        assert len(cluster.workers["both-0"].received.decodes) == 5


async def test_hand_overs_that_fail_after_each_token_are_given_up() -> None:
    """B8: two in a row, or four times as many in all."""
    failures = Failures(UnreachablePairs(), max_replays=5, max_deaths=3)
    attempt = _FailedAttempt(Failure(TransferError("torn"), cast(Any, None), frozenset()))
    for number in range(8):
        assert not failures.is_local, number
        failures.note(cast(Any, attempt), TransferError("torn"))
        failures.progress(cast(Any, attempt))
    assert failures.is_local
