"""A worker that drains loses its legs to other workers, and no request fails or counts a failure."""

import asyncio
from functools import partial
from typing import Any

import pytest

from contract.errors import InvalidRequestError
from contract.identity import Role
from contract.membership import DrainOrder
from protos import worker_pb2 as pb
from tests.fakes.router.script import Script
from tests.fakes.router.worker import ScriptedWorker
from tests.router.cluster import PAIR, Cluster, running_cluster
from tests.router.test_ends import TEXT, TOKENS, nothing_is_left
from tests.router.test_replay import ANSWER, texts

FULL = pb.Credit(max_requests=256, max_tokens=2**20)
LATER = 600.0


def stalling_at(index: int) -> Any:
    """Return a script whose first attempt stalls before the token with this index; later attempts play to the end.

    Nothing is handed off, so that all that is left at the deadline is replayed.
    """
    refusal = InvalidRequestError("the script hands nothing off")
    return lambda task: Script(
        tokens=TOKENS, stall_at=None if task.attempt else index, refuse_hand_off=refusal
    )


def drain(worker: ScriptedWorker, seconds: float, *, is_empty: bool = False) -> None:
    worker.stream.grant(pb.Credit(is_draining=True, drain_seconds=seconds, is_empty=is_empty))


async def until_draining(cluster: Cluster, *, is_on: bool = True) -> None:
    await cluster.until(lambda state: any(w["is_draining"] for w in state["workers"]) is is_on)


def has_empty(is_one: bool, state: dict[str, Any]) -> bool:
    """Return True if a worker is listed as empty, or if none is and ``is_one`` is False."""
    return any(worker["is_empty"] for worker in state["workers"]) is is_one


async def answering(cluster: Cluster) -> tuple[asyncio.Task[list[str]], ScriptedWorker]:
    """Begin one answer; return it, and the worker that decodes it, once tokens of it have arrived."""
    asking = asyncio.create_task(texts(cluster))
    await cluster.until(lambda state: state["requests"]["streaming"])
    return asking, decoding(cluster)


def decoding(cluster: Cluster, attempt: int = 0) -> ScriptedWorker:
    found = [
        worker
        for worker in cluster.workers.values()
        if any(call.task.attempt == attempt for call in worker.received.decodes)
    ]
    (worker,) = found
    return worker


async def results(cluster: Cluster) -> dict[str, float]:
    metrics = await cluster.metrics()
    name = "kvbaton_drains_total"
    return {key[len(name) :]: value for key, value in metrics.items() if key.startswith(name)}


@pytest.mark.parametrize("roles", [PAIR, (Role.AGGREGATED,)])
@pytest.mark.parametrize("stall_at", [2, 4])
async def test_what_is_left_at_the_deadline_continues_elsewhere(
    roles: tuple[Role, ...], stall_at: int
) -> None:
    """max_replays=0: a single failure would end the request. The answer is whole, and each token comes once."""
    async with running_cluster(stalling_at(stall_at), roles, max_replays=0) as cluster:
        await cluster.add(roles[-1], "other")
        asking, worker = await answering(cluster)
        drain(worker, 0.2)
        assert "".join(await asking) == ANSWER
        again = decoding(cluster, attempt=1)
        assert again is not worker
        (call,) = again.received.decodes
        assert call.task.first_index == stall_at + (roles == PAIR)
        await worker.received.wait_for(lambda each: len(each.cancels) == 1)
        drain(worker, 0.0, is_empty=True)
        await cluster.until(lambda state: any(w["is_empty"] for w in state["workers"]))
        assert await results(cluster) == {'{result="moved"}': 1}
        await nothing_is_left(cluster)


@pytest.mark.parametrize("roles", [PAIR, (Role.AGGREGATED,)])
async def test_a_leg_that_has_not_begun_is_begun_elsewhere_at_once(roles: tuple[Role, ...]) -> None:
    stall_at = 1 if roles == PAIR else 0
    async with running_cluster(stalling_at(stall_at), roles, max_replays=0) as cluster:
        asking = asyncio.create_task(texts(cluster))
        worker = cluster.workers[f"{roles[-1].value}-0"]
        await worker.received.wait_for(lambda each: len(each.decodes) == 1)
        await cluster.add(roles[-1], "other")
        drain(worker, LATER)
        assert "".join(await asking) == ANSWER
        assert decoding(cluster, attempt=1) is cluster.workers["other"]
        await nothing_is_left(cluster)


async def test_a_lone_workers_legs_stay_until_the_deadline_and_then_wait_for_another_worker() -> None:
    """No other worker decodes: nothing is moved early, and the answer continues where it stopped."""
    async with running_cluster(stalling_at(1), max_replays=0, worker_wait_seconds=30) as cluster:
        asking = asyncio.create_task(texts(cluster))
        decode = cluster.workers["decode-0"]
        await decode.received.wait_for(lambda each: len(each.decodes) == 1)
        drain(decode, 0.3)
        await until_draining(cluster)
        assert not decode.received.cancels
        await decode.received.wait_for(lambda each: len(each.cancels) == 1)
        await cluster.until(lambda state: state["num_in_line"] == 1)
        await cluster.add(Role.DECODE, "other")
        assert "".join(await asking) == ANSWER


async def test_a_prefill_workers_prompts_continue_elsewhere_at_the_deadline() -> None:
    """A prompt that was not computed in time is computed by another worker, for the same decode worker or another."""
    async with running_cluster(stalling_at(0), max_replays=0) as cluster:
        await cluster.add(Role.PREFILL, "other")
        asking = asyncio.create_task(texts(cluster))
        await cluster.until(lambda _: any(each.received.prefills for each in cluster.workers.values()))
        first = next(worker for worker in cluster.workers.values() if worker.received.prefills)
        drain(first, 0.2)
        assert "".join(await asking) == ANSWER
        assert len(first.received.prefills) == 1
        await nothing_is_left(cluster)


async def test_a_computed_prompt_outlives_the_drain_of_its_worker() -> None:
    """A prefill leg whose KV was read is over: the deadline of its worker does not touch the answer."""
    async with running_cluster(stalling_at(3)) as cluster:
        await cluster.add(Role.PREFILL, "other")
        asking, decode = await answering(cluster)
        await cluster.until(lambda state: sum(w["num_legs"] for w in state["workers"]) == 1)
        first = next(worker for worker in cluster.workers.values() if worker.received.prefills)
        drain(first, 0.0)
        await cluster.until(lambda state: any(w["is_draining"] for w in state["workers"]))
        drain(first, 0.0, is_empty=True)
        await cluster.until(lambda state: any(w["is_empty"] for w in state["workers"]))
        assert not decode.received.cancels
        await cluster.add(Role.DECODE, "new")
        drain(decode, 0.0)
        assert "".join(await asking) == ANSWER


async def test_a_worker_that_is_empty_twice_has_drained_once() -> None:
    async with running_cluster(stalling_at(2)) as cluster:
        worker = cluster.workers["decode-0"]
        for is_empty in (True, False, True):
            drain(worker, LATER, is_empty=is_empty)
            await cluster.until(partial(has_empty, is_empty))
        assert await results(cluster) == {'{result="empty"}': 1}
        await worker.stream.close()
        await cluster.until(lambda state: len(state["workers"]) == 1)
        assert await results(cluster) == {'{result="empty"}': 1}


async def test_an_undone_drain_moves_nothing_and_the_worker_serves_again() -> None:
    async with running_cluster(stalling_at(2)) as cluster:
        await cluster.add(Role.DECODE, "other")
        asking, worker = await answering(cluster)
        drain(worker, 0.5)
        await until_draining(cluster)
        worker.stream.grant(FULL)
        await until_draining(cluster, is_on=False)
        await asyncio.sleep(0.6)  # the deadline passes, and must change nothing
        assert not worker.received.cancels
        assert await results(cluster) == {'{result="undone"}': 1}
        drain(worker, 0.0)
        assert "".join(await asking) == ANSWER
        assert (await results(cluster))['{result="undone"}'] == 1


@pytest.mark.parametrize("roles", [PAIR, (Role.AGGREGATED,)])
async def test_no_leg_is_bound_to_a_draining_worker(roles: tuple[Role, ...]) -> None:
    async with running_cluster(Script(tokens=TOKENS), roles) as cluster:
        twins = {role: await cluster.add(role, f"{role.value}-1") for role in roles}
        for role in roles:
            drain(cluster.workers[f"{role.value}-0"], LATER)
        await cluster.until(lambda state: sum(w["is_draining"] for w in state["workers"]) == len(roles))
        for _ in range(6):
            assert "".join(await texts(cluster)) == ANSWER
        assert len(twins[roles[-1]].received.decodes) == 6
        assert not cluster.workers[f"{roles[-1].value}-0"].received.decodes


async def test_two_drains_at_once_leave_the_third_worker() -> None:
    """Legs leave both workers, also those that were just moved from the other one."""
    async with running_cluster(stalling_at(2), max_replays=0) as cluster:
        for name in ("decode-1", "decode-2"):
            await cluster.add(Role.DECODE, name)
        asking = [asyncio.create_task(texts(cluster)) for _ in range(6)]
        await cluster.until(lambda state: state["requests"]["streaming"] == 6)
        for name, seconds in (("decode-0", 0.1), ("decode-1", 0.2)):
            drain(cluster.workers[name], seconds)
        await until_draining(cluster)
        await cluster.add(Role.DECODE, "decode-3")
        drain(cluster.workers["decode-2"], 0.4)
        assert ["".join(answer) for answer in await asyncio.gather(*asking)] == [ANSWER] * 6
        await nothing_is_left(cluster)


async def test_a_draining_worker_that_dies_is_lost_and_its_answers_continue() -> None:
    async with running_cluster(stalling_at(2)) as cluster:
        await cluster.add(Role.DECODE, "other")
        asking, worker = await answering(cluster)
        drain(worker, LATER)
        await until_draining(cluster)
        await worker.die()
        assert "".join(await asking) == ANSWER
        assert await results(cluster) == {'{result="lost"}': 1}


@pytest.mark.parametrize("n", [1, 3])
async def test_all_answers_to_a_prompt_leave(n: int) -> None:
    async with running_cluster(stalling_at(2), max_replays=0) as cluster:
        await cluster.add(Role.DECODE, "other")
        asking = asyncio.create_task(cluster.post(TEXT, {"prompt": "x", "n": n}))
        await cluster.until(lambda state: state["requests"]["streaming"] == n)
        drain(decoding(cluster), 0.1)
        status, body = await asking
        assert (status, [choice["text"] for choice in body["choices"]]) == (200, [ANSWER] * n)
        await nothing_is_left(cluster)


async def test_the_order_to_drain_arrives_at_the_worker() -> None:
    """The router's messages to a worker use its stream, in order."""
    async with running_cluster(Script(tokens=TOKENS)) as cluster:
        (attached,) = [w for w in cluster.service._path.registry.workers if w.name == "decode-0"]
        stream = cluster.workers["decode-0"].stream
        attached.drain(DrainOrder(deadline_seconds=3.0))
        attached.drain(DrainOrder())
        attached.undrain()
        orders = [await stream.next_order() for _ in range(3)]
        assert [order.WhichOneof("message") for order in orders] == ["drain", "drain", "undrain"]
        assert orders[0].drain.deadline_seconds == 3.0
        assert not orders[1].drain.HasField("deadline_seconds")
