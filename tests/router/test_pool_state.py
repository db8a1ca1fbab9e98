"""The load of each pool that autoscalers read: utilization, the wait for it, and the pressure."""

import asyncio

import pytest

from contract.identity import Role
from contract.membership import Credit, Load, Registration
from protos import worker_pb2 as pb
from router.routing.running_shares import Held
from router.telemetry.goals import Goals
from router.telemetry.pool_state import PoolState, RecentLatency, decided_by, pool_states
from router.workers.attached_worker import AttachedWorker
from router.workers.order_stream import OrderStream
from router.workers.worker_facts import ShownState
from tests.fakes.router.script import Script
from tests.router.cluster import running_cluster
from tests.text.tiny_model import END, byte_ids

GOALS = Goals(ttft_seconds=1.0, itl_seconds=0.1)
FREE = Credit(max_requests=10, max_tokens=1000, number=1)


def worker(role: Role, credit: Credit = FREE, load: Load | None = None, num_legs: int = 0) -> AttachedWorker:
    """Return an attached worker with this many legs of ten tokens."""
    registration = Registration(worker_id="w", role=role.value)
    made = AttachedWorker(registration, None, OrderStream("w", 10.0), Held(), lambda *_: None)  # type: ignore[arg-type]
    made.capacity.grant(credit)
    made.capacity.report_load(load or Load())
    for _ in range(num_legs):
        made.capacity.hold("", 10)
    return made


@pytest.mark.parametrize(
    ("made", "used"),
    [
        (worker(Role.DECODE, num_legs=4), 0.4),
        (worker(Role.DECODE, Credit(max_requests=10, max_tokens=50, number=1), num_legs=2), 0.4),
        (worker(Role.DECODE, load=Load(kv_cache_usage=0.7), num_legs=4), 0.7),
        (worker(Role.DECODE, Credit(number=1)), 1.0),
        (worker(Role.DECODE, Credit(max_requests=1, max_tokens=10, number=1), num_legs=3), 1.0),
    ],
    ids=["requests", "tokens", "kv", "other routers hold all", "more than all"],
)
def test_utilization_is_the_largest_used_share(made: AttachedWorker, used: float) -> None:
    assert pool_states([made], {})[Role.DECODE].utilization == pytest.approx(used)


def test_workers_that_do_not_serve_are_counted_and_not_averaged() -> None:
    draining = worker(Role.PREFILL, Credit(is_draining=True, number=2), load=Load(kv_cache_usage=0.9))
    pool = pool_states([draining, worker(Role.PREFILL, num_legs=5)], {})[Role.PREFILL]
    assert pool.states == {ShownState.DRAINING: 1, ShownState.SERVING: 1}
    assert pool.utilization == 0.5


def test_a_pool_that_is_needed_is_there_without_workers() -> None:
    assert pool_states([], {}).keys() == {Role.PREFILL, Role.DECODE}
    assert pool_states([worker(Role.DECODE)], {}).keys() == {Role.PREFILL, Role.DECODE}
    assert pool_states([worker(Role.AGGREGATED)], {}).keys() == {Role.AGGREGATED}


def test_a_wait_counts_for_the_pools_without_room() -> None:
    full = worker(Role.DECODE, num_legs=10)
    waits = {Role.PREFILL: 3.0, Role.DECODE: 3.0}
    pools = pool_states([worker(Role.PREFILL), full], waits)
    assert {role: pool.queue_seconds for role, pool in pools.items()} == {Role.PREFILL: 0, Role.DECODE: 3}
    pools = pool_states([full], waits)
    assert {role: pool.queue_seconds for role, pool in pools.items()} == {Role.PREFILL: 3, Role.DECODE: 3}
    only = pool_states([worker(Role.AGGREGATED, num_legs=10)], waits)
    assert only[Role.AGGREGATED].queue_seconds == 3
    cache_full = worker(Role.DECODE, load=Load(kv_cache_usage=1.0))
    assert pool_states([cache_full], waits)[Role.DECODE].wait_seconds == 3


def test_queued_prompts_are_seconds_of_the_workers_own_speed() -> None:
    loads = [
        Load(queued_prompt_tokens=3000, prefill_seconds_per_token=0.001),
        Load(queued_prompt_tokens=1000, prefill_seconds_per_token=0.001),
        Load(queued_prompt_tokens=1000),
    ]
    pool = pool_states([worker(Role.PREFILL, load=load) for load in loads], {})[Role.PREFILL]
    assert pool.queue_seconds == pytest.approx(1.0), "a worker that reports anything does not move the median"


@pytest.mark.parametrize(
    ("pool", "recent", "expected"),
    [
        (PoolState(Role.DECODE), RecentLatency(), 0.0),
        (PoolState(Role.DECODE, utilization=0.85), RecentLatency(itl=0.05), 1.0),
        (PoolState(Role.DECODE, utilization=0.1), RecentLatency(itl=0.25), 2.5),
        (PoolState(Role.PREFILL, utilization=0.1, wait_seconds=3), RecentLatency(ttft=0.5), 3.0),
        (PoolState(Role.PREFILL, backlog_seconds=0.5), RecentLatency(ttft=1.5), 1.5),
    ],
)
def test_pressure_is_one_at_the_goal_and_the_largest_of_its_parts(
    pool: PoolState, recent: RecentLatency, expected: float
) -> None:
    assert pool.pressure(GOALS, recent) == pytest.approx(expected)


def test_each_pool_answers_for_its_part_of_the_latency() -> None:
    recent = RecentLatency(ttft=2.0, itl=0.2)
    pools = pool_states([worker(Role.PREFILL), worker(Role.DECODE)], {})
    assert decided_by(Role.PREFILL, pools, recent) == RecentLatency(ttft=2.0)
    assert decided_by(Role.DECODE, pools, recent) == RecentLatency(itl=0.2)
    assert decided_by(Role.AGGREGATED, pools, recent) == recent


def test_first_tokens_that_wait_for_room_to_decode_are_not_for_more_prefill_workers() -> None:
    waits = {Role.PREFILL: 3.0, Role.DECODE: 3.0}
    pools = pool_states([worker(Role.PREFILL), worker(Role.DECODE, num_legs=10)], waits)
    assert decided_by(Role.PREFILL, pools, RecentLatency(ttft=2.0)) == RecentLatency()


async def test_a_router_publishes_them_with_waits_decisions_and_attainment() -> None:
    """Two requests are answered, and one waits for a decode worker whose credit is used up."""
    async with running_cluster(Script(tokens=[*byte_ids(b"ab"), END])) as cluster:
        for _ in range(2):
            assert (await cluster.post("/v1/completions", {"prompt": "x"}))[0] == 200
        metrics = await cluster.metrics()
        assert metrics['kvbaton_routing_decisions_total{kind="prefill+decode"}'] == 2
        assert metrics['kvbaton_slo_attainment{slo="all"}'] == 1
        assert metrics['kvbaton_slo_requests_total{result="met",slo="ttft"}'] == 2
        assert metrics['kvbaton_queue_seconds{pool="decode"}'] == 0
        assert 0 < metrics['kvbaton_scaling_pressure{pool="decode"}'] < 1
        assert 'kvbaton_scaling_pressure{pool="both"}' not in metrics
        decode = cluster.workers["decode-0"]
        decode.stream.grant(pb.Credit(number=2))
        await cluster.until(lambda state: state["workers"][-1]["max_requests"] == 0)
        waiting = asyncio.create_task(cluster.post("/v1/completions", {"prompt": "x"}))
        await cluster.until(lambda state: state["num_in_line"] == 1)
        metrics = await cluster.metrics()
        assert metrics['kvbaton_pool_utilization{pool="decode"}'] == 1
        assert metrics['kvbaton_queue_seconds{pool="decode"}'] > 0
        assert metrics['kvbaton_queue_seconds{pool="prefill"}'] == 0
        assert metrics['kvbaton_workers{pool="decode",state="serving"}'] == 1
        decode.stream.grant(pb.Credit(max_requests=16, max_tokens=2**16, number=3))
        assert (await waiting)[0] == 200
