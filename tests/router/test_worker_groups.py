"""The admin API takes the workers of a data-parallel group as one."""

import asyncio

from contract.identity import Role
from protos import worker_pb2 as pb
from tests.router.cluster import PAIR, running_cluster
from tests.router.test_worker_admin import HELLO, obey, ordered, workers_of


async def test_a_data_parallel_group_is_drained_and_serves_again_as_a_whole() -> None:
    """The order names one of its ranks."""
    async with running_cluster(HELLO, PAIR) as cluster:
        ranks = [await cluster.add(Role.DECODE, f"rank-{number}", group="host:9300") for number in range(2)]
        assert [facts["group"] for facts in (await workers_of(cluster)).values()] == [
            None,
            None,
            *["host:9300"] * 2,
        ]
        drained = asyncio.create_task(ordered(cluster, "rank-1/drain?wait=60"))
        for rank in ranks:
            async with asyncio.timeout(20):
                assert (await obey(rank, pb.Credit(is_draining=True, drain_seconds=7))).HasField("drain")
        ranks[1].stream.grant(pb.Credit(is_draining=True, is_empty=True))
        await cluster.until(lambda state: sum(w["is_draining"] for w in state["workers"]) == 2)
        assert not drained.done()
        ranks[0].stream.grant(pb.Credit(is_draining=True, is_empty=True))
        status, facts = await drained
        assert (status, facts["id"], facts["state"]) == (200, "rank-1", "empty")
        undrained = asyncio.create_task(ordered(cluster, "rank-0/undrain"))
        for rank in ranks:
            assert (await obey(rank, pb.Credit(max_requests=256, max_tokens=2**20))).HasField("undrain")
        assert (await undrained)[0] == 200


async def test_a_data_parallel_group_changes_its_role_as_a_whole() -> None:
    """And not if no worker of its role would be left."""
    async with running_cluster(HELLO, ()) as cluster:
        await cluster.add(Role.PREFILL, "prefill-0")
        ranks = [await cluster.add(Role.DECODE, f"rank-{number}", group="host:9300") for number in range(2)]
        status, answer = await ordered(cluster, "rank-0/flip?role=prefill")
        assert (status, "no decode worker would be left" in answer["error"]["message"]) == (400, True)
        await cluster.add(Role.DECODE, "other")
        flipping = asyncio.create_task(ordered(cluster, "rank-0/flip?role=prefill&wait=60"))
        orders = [await obey(rank, pb.Credit(number=2)) for rank in ranks]
        assert [order.role_change.role for order in orders] == ["prefill", "prefill"]
        for rank, order in zip(ranks, orders, strict=True):
            assert not flipping.done()
            rank.stream.set_role("prefill", order.role_change.epoch)
            rank.stream.grant(pb.Credit(max_requests=256, max_tokens=2**20, number=3))
        async with asyncio.timeout(20):
            assert (await flipping)[0] == 200
        roles = [facts["role"] for facts in (await workers_of(cluster)).values()]
        assert sorted(roles) == ["decode", "prefill", "prefill", "prefill"]
