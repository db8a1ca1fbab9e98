"""Late binding: requests wait in the router until workers have room, and are bound in order."""

import asyncio
from functools import partial
from typing import Any

from contract.identity import Role
from protos.worker_pb2 import Credit
from tests.fakes.router.script import Script
from tests.router.cluster import PAIR, Cluster, running_cluster
from tests.router.test_ends import TEXT, TOKENS, nothing_is_left

ONE = Credit(max_requests=1, max_tokens=1000)


def _is_in_line(count: int, state: dict[str, Any]) -> bool:
    return bool(state["num_in_line"] == count)


async def grant_one(cluster: Cluster, name: str) -> None:
    cluster.workers[name].stream.grant(ONE)
    await cluster.until(
        lambda state: any(w["worker_id"] == name and w["max_requests"] == 1 for w in state["workers"])
    )


async def test_a_worker_gets_no_more_requests_than_its_credit() -> None:
    async with running_cluster(Script(tokens=TOKENS, token_delay_seconds=0.01)) as cluster:
        await grant_one(cluster, "decode-0")
        asking = [asyncio.create_task(cluster.post(TEXT, {"prompt": "x"})) for _ in range(5)]
        seen: set[int] = set()
        while not all(task.done() for task in asking):
            state = await cluster.debug_state()
            seen |= {w["num_legs"] for w in state["workers"] if w["worker_id"] == "decode-0"}
        assert seen <= {0, 1}
        assert {(await task)[1]["choices"][0]["text"] for task in asking} == {"abcdef"}
        await nothing_is_left(cluster)


async def test_requests_are_admitted_by_priority_then_by_arrival() -> None:
    async with running_cluster(Script(tokens=TOKENS, stall_at=1), (Role.AGGREGATED,)) as cluster:
        await grant_one(cluster, "both-0")
        first = asyncio.create_task(cluster.post(TEXT, {"prompt": "x"}))
        await cluster.until(lambda state: state["requests"]["streaming"] == 1)
        cluster.script = lambda _: Script(tokens=TOKENS)
        asking = []
        for number, priority in enumerate((0, 5, 0, 5)):
            body = {"prompt": "x", "seed": number, "priority": priority}
            asking.append(asyncio.create_task(cluster.post(TEXT, body)))
            await cluster.until(partial(_is_in_line, number + 1))
        first.cancel()
        await asyncio.gather(*asking)
        seeds = [call.task.sampling.seed for call in cluster.workers["both-0"].received.decodes[1:]]
        assert seeds == [1, 3, 0, 2]


async def test_a_big_request_at_the_head_is_not_overtaken() -> None:
    async with running_cluster(Script(tokens=TOKENS, stall_at=1), (Role.AGGREGATED,)) as cluster:
        worker = cluster.workers["both-0"]
        worker.stream.grant(Credit(max_requests=9, max_tokens=60))
        await cluster.until(lambda state: state["workers"][0]["max_tokens"] == 60)
        first = asyncio.create_task(cluster.post(TEXT, {"prompt": "x", "max_tokens": 20}))
        await cluster.until(lambda state: state["requests"]["streaming"] == 1)
        cluster.script = lambda _: Script(tokens=TOKENS)
        big = asyncio.create_task(cluster.post(TEXT, {"prompt": "x" * 40, "max_tokens": 10}))
        await cluster.until(lambda state: state["num_in_line"] == 1)
        small = asyncio.create_task(cluster.post(TEXT, {"prompt": "x", "max_tokens": 7}))
        await cluster.until(lambda state: state["num_in_line"] == 2)
        first.cancel()
        await asyncio.gather(big, small)
        assert [len(call.task.prompt_token_ids) for call in worker.received.decodes] == [1, 40, 1]


async def test_a_client_that_disconnects_leaves_the_queue() -> None:
    async with running_cluster(Script(tokens=TOKENS, stall_at=1), (Role.AGGREGATED,)) as cluster:
        await grant_one(cluster, "both-0")
        asking = [asyncio.create_task(cluster.post(TEXT, {"prompt": "x"})) for _ in range(3)]
        await cluster.until(lambda state: state["num_in_line"] == 2)
        received = cluster.workers["both-0"].received
        await received.wait_for(lambda calls: len(calls.decodes) == 1)
        for task in asking:
            task.cancel()
        await cluster.until(lambda state: state["num_in_line"] == 0)
        await cluster.until(lambda state: state["workers"][0]["num_legs"] == 0)
        assert len(received.decodes) == 1


async def test_requests_wait_for_a_role_that_comes_soon() -> None:
    async with running_cluster(Script(tokens=TOKENS), PAIR, worker_wait_seconds=30) as cluster:
        await cluster.workers["decode-0"].die()
        await cluster.service.wait_for_workers(1)
        asking = asyncio.create_task(cluster.post(TEXT, {"prompt": "x"}))
        await cluster.until(lambda state: state["num_in_line"] == 1)
        await cluster.add(Role.DECODE, "decode-1")
        assert (await asking)[0] == 200


async def test_requests_are_rejected_at_once_after_the_time_limit_of_a_role() -> None:
    async with running_cluster(Script(tokens=TOKENS), PAIR, worker_wait_seconds=0.05) as cluster:
        await cluster.workers["decode-0"].die()
        await cluster.service.wait_for_workers(1)
        for _ in range(2):
            status, answer = await cluster.post(TEXT, {"prompt": "x"})
            assert (status, answer["error"]["code"]) == (503, "unavailable")
            assert "no decode worker is attached" in answer["error"]["message"]
        await cluster.add(Role.DECODE, "decode-1")
        assert (await cluster.post(TEXT, {"prompt": "x"}))[0] == 200


async def test_the_deadline_ends_a_queued_request() -> None:
    async with running_cluster(
        Script(tokens=TOKENS, stall_at=1), (Role.AGGREGATED,), request_timeout_seconds=1
    ) as cluster:
        await grant_one(cluster, "both-0")
        answers = await asyncio.gather(*(cluster.post(TEXT, {"prompt": "x"}) for _ in range(2)))
        assert [(status, answer["error"]["code"]) for status, answer in answers] == [(504, "deadline")] * 2
        await nothing_is_left(cluster)
