"""Time limits for a role without a worker, and requests that are not delayed meanwhile."""

import asyncio

from contract.identity import Role
from protos import worker_pb2 as pb
from tests.fakes.router.script import Script
from tests.router.cluster import PAIR, running_cluster
from tests.router.test_ends import TEXT, TOKENS, nothing_is_left
from tests.router.test_replay import ANSWER, texts


def at_first_stalled(task: pb.Task) -> Script:
    return Script(tokens=TOKENS, stall_at=None if task.attempt else 2)


async def test_new_requests_without_prefill_worker_do_not_hold_up_a_replay_that_needs_none() -> None:
    """The decode worker computes it itself, though requests of a higher priority wait before it."""
    async with running_cluster(at_first_stalled, worker_wait_seconds=60) as cluster:
        asking = asyncio.create_task(texts(cluster))
        await cluster.until(lambda state: state["requests"]["streaming"] == 1)
        await cluster.workers["prefill-0"].die()
        await cluster.service.wait_for_workers(1)
        urgent = asyncio.create_task(cluster.post(TEXT, {"prompt": "x", "priority": 9}))
        await cluster.until(lambda state: state["num_in_line"] == 1)
        other = await cluster.add(Role.DECODE, "decode-1")
        await cluster.workers["decode-0"].die()
        assert "".join(await asking) == ANSWER
        assert len(other.received.decodes) == 1
        assert not urgent.done()
        urgent.cancel()
        await asyncio.wait([urgent])
        await cluster.until(lambda state: state["num_in_line"] == 0)
        await nothing_is_left(cluster)


async def test_the_time_limit_of_one_role_is_not_used_up_by_another() -> None:
    """New requests are rejected because no prefill worker is attached; a replay still waits for its decode worker."""
    async with running_cluster(at_first_stalled, PAIR, worker_wait_seconds=1.5) as cluster:
        asking = asyncio.create_task(texts(cluster))
        await cluster.until(lambda state: state["requests"]["streaming"] == 1)
        await cluster.workers["prefill-0"].die()
        await cluster.service.wait_for_workers(1)
        assert (await cluster.post(TEXT, {"prompt": "x"}))[0] == 503
        await cluster.workers["decode-0"].die()
        await cluster.until(lambda state: state["num_in_line"] == 1 or asking.done())
        await cluster.add(Role.DECODE, "decode-0")
        assert "".join(await asking) == ANSWER


async def test_the_queue_is_empty_when_the_router_has_stopped() -> None:
    async with running_cluster(Script(tokens=TOKENS), (), worker_wait_seconds=60) as cluster:
        both = await cluster.add(Role.AGGREGATED)
        await cluster.service.wait_ready()
        await both.die()
        await cluster.service.wait_for_workers(0)
        asking = [asyncio.create_task(cluster.post(TEXT, {"prompt": "x"})) for _ in range(20)]
        await cluster.until(lambda state: state["num_in_line"] == 20)
        await cluster.service.stop()
        await asyncio.wait(asking)
        assert len(cluster.service._path.queue) == 0
        for task in asking:
            assert task.exception() or task.result()[0] >= 499
