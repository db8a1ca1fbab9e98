"""The share of the workers that one client may hold while other clients are active."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.identity import Role
from protos import worker_pb2 as pb
from router.running_shares import RECENT_SECONDS, Held, RunningShares, TotalCredit
from router.testing.script import Script
from tests.router.cluster import Cluster, running_cluster
from tests.router.test_ends import TEXT, TOKENS

KEYS = "alice-secret-key,bob-secret-key"
FOUR = pb.Credit(max_requests=4, max_tokens=2**20)


def use_of(max_requests: int, max_tokens: int, **held: tuple[int, int]) -> TotalCredit:
    found = Held()
    for tenant, (num_requests, num_tokens) in held.items():
        found.add(tenant, num_requests, num_tokens)
    return TotalCredit(1, max_requests, max_tokens, found)


def test_a_client_alone_may_hold_everything() -> None:
    shares = RunningShares(0.5)
    shares.note("alice")
    assert shares.may_begin("alice", 1, 1, use_of(4, 100, alice=(4, 100)))


@pytest.mark.parametrize(
    ("held", "asked", "expected"),
    [
        ((0, 0), (8, 200), True),
        ((1, 10), (3, 10), True),
        ((1, 10), (4, 10), False),
        ((4, 10), (1, 10), False),
        ((1, 90), (1, 10), True),
        ((1, 90), (1, 11), False),
    ],
)
def test_requests_and_tokens_count(held: tuple[int, int], asked: tuple[int, int], expected: bool) -> None:
    shares = RunningShares(0.5)
    shares.note("bob")
    assert shares.may_begin("alice", *asked, use_of(8, 200, alice=held)) == expected


def test_a_client_counts_as_present_for_a_while_and_while_it_runs() -> None:
    now = [0.0]
    shares = RunningShares(0.5, lambda: now[0])
    shares.note("bob")
    alone = use_of(4, 100, alice=(4, 0))
    assert not shares.may_begin("alice", 1, 1, alone)
    now[0] = RECENT_SECONDS
    assert shares.may_begin("alice", 1, 1, alone)
    assert not shares.may_begin("alice", 1, 1, use_of(4, 100, alice=(4, 0), bob=(1, 0)))


@given(
    st.floats(0.01, 1.0),
    st.integers(1, 8),
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 50)), max_size=20),
)
def test_a_client_that_holds_nothing_may_always_begin(
    share: float, max_requests: int, running: list[tuple[str, int]]
) -> None:
    shares, held = RunningShares(share), Held()
    shares.note("c")
    for tenant, num_tokens in running:
        held.add(tenant, 1, num_tokens)
    assert shares.may_begin("c", 1000, 1000, TotalCredit(1, max_requests, 100, held))
    for tenant, num_tokens in running:
        held.add(tenant, -1, -num_tokens)
    assert not held.num_requests and not held.num_tokens


async def ask(cluster: Cluster, key: str, **fields: int) -> int:
    headers = {"Authorization": f"Bearer {key}-secret-key"}
    return (await cluster.post(TEXT, {"prompt": "x", **fields}, headers=headers))[0]


async def until_running(cluster: Cluster, count: int) -> None:
    await cluster.until(lambda state: state["requests"]["streaming"] == count)


@pytest.mark.parametrize("roles", [(Role.AGGREGATED,), (Role.PREFILL, Role.DECODE)])
async def test_one_key_does_not_take_all_workers_while_another_is_there(roles: tuple[Role, ...]) -> None:
    """H5, M3: one key's long answers, of the highest priority, leave room for another key."""
    async with running_cluster(Script(tokens=TOKENS), roles, api_keys=KEYS) as cluster:
        name = next(name for name in cluster.workers if "prefill" not in name)
        cluster.workers[name].stream.grant(FOUR)
        await cluster.until(lambda state: any(w["max_requests"] == 4 for w in state["workers"]))
        assert await ask(cluster, "bob") == 200
        cluster.script = lambda _: Script(tokens=TOKENS, stall_at=1)
        hogs = [asyncio.create_task(ask(cluster, "alice", priority=100)) for _ in range(8)]
        await until_running(cluster, 2)
        cluster.script = lambda _: Script(tokens=TOKENS)
        async with asyncio.timeout(20):
            assert await ask(cluster, "bob") == 200
        await cluster.until(lambda state: state["num_in_line"] == 6)
        assert (await cluster.debug_state())["requests"]["streaming"] == 2
        for hog in hogs:
            hog.cancel()


async def test_one_key_alone_takes_all_workers() -> None:
    """Nothing is kept free for keys that are not in use."""
    async with running_cluster(
        Script(tokens=TOKENS, stall_at=1), (Role.AGGREGATED,), api_keys=KEYS
    ) as cluster:
        cluster.workers["both-0"].stream.grant(FOUR)
        await cluster.until(lambda state: any(w["max_requests"] == 4 for w in state["workers"]))
        hogs = [asyncio.create_task(ask(cluster, "alice")) for _ in range(8)]
        await until_running(cluster, 4)
        for hog in hogs:
            hog.cancel()
