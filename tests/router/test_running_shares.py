"""The share of the workers that one client may hold while other clients are active."""

import asyncio

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.identity import Role
from contract.sampling import choice_seed
from protos import worker_pb2 as pb
from router.routing.policy import PlacementRequest, place
from router.routing.running_shares import RECENT_SECONDS, Held, RunningShares, TotalCredit
from router.routing.views import WorkerView, WorkerViews
from tests.fakes.router.script import Script
from tests.router.cluster import Cluster, running_cluster
from tests.router.test_ends import TEXT, TOKENS

KEYS = "alice-secret-key,bob-secret-key"
FOUR = pb.Credit(max_requests=4, max_tokens=2**20)


def use_of(max_requests: int, max_tokens: int, **held: tuple[int, int]) -> TotalCredit:
    found = Held()
    for tenant, (num_requests, num_tokens) in held.items():
        found.add(tenant, num_requests, num_tokens)
    return TotalCredit(1, max_requests, max_tokens, found)


def begun(shares: RunningShares, tenant: str, num_choices: int, tokens: int, use: TotalCredit) -> int:
    """Return how many choices of this many tokens may begin of a request without a prompt."""
    return shares.num_to_begin(tenant, num_choices, 0, tokens, use)


def test_a_client_alone_may_hold_everything_but_the_room_of_a_short_request() -> None:
    shares = RunningShares(0.5)
    shares.note("alice")
    assert begun(shares, "alice", 1, 1, use_of(4, 100, alice=(3, 90))) == 1
    assert begun(shares, "alice", 1, 5, use_of(4, 100, alice=(3, 90))) == 0
    assert begun(shares, "alice", 128, 10, use_of(256, 160)) == 15
    assert begun(shares, "alice", 256, 1, use_of(64, 10**6)) == 63
    assert begun(shares, "alice", 1, 60, use_of(8, 100, alice=(1, 60))) == 1, "no room could stay free"


def test_without_keys_nothing_is_bounded() -> None:
    assert begun(RunningShares(0.5), "", 128, 256, use_of(8, 100)) == 128


@pytest.mark.parametrize(
    ("held", "asked", "expected"),
    [
        ((0, 0), (8, 25), 4),
        ((0, 0), (2, 60), 1),
        ((0, 0), (1, 1000), 1),
        ((1, 10), (3, 3), 3),
        ((1, 10), (4, 3), 3),
        ((4, 10), (1, 10), 0),
        ((1, 90), (1, 10), 1),
        ((1, 90), (1, 11), 0),
    ],
)
def test_a_client_that_is_not_alone_may_begin_its_share(
    held: tuple[int, int], asked: tuple[int, int], expected: int
) -> None:
    shares = RunningShares(0.5)
    shares.note("bob")
    assert begun(shares, "alice", *asked, use_of(8, 200, alice=held)) == expected


def test_a_client_counts_as_present_for_a_while_and_while_it_runs() -> None:
    now = [0.0]
    shares = RunningShares(0.5, lambda: now[0])
    shares.note("bob")
    alone = use_of(4, 100, alice=(3, 0))
    assert not begun(shares, "alice", 1, 1, alone)
    now[0] = RECENT_SECONDS
    assert begun(shares, "alice", 1, 1, alone)
    assert not begun(shares, "alice", 1, 1, use_of(4, 100, alice=(3, 0), bob=(1, 0)))


class Pool:
    """One worker and two keys, without a service: requests begin as ``Placements`` lets them."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self.shares = RunningShares(0.5)
        self.held = Held()
        self.use = TotalCredit(1, max_requests, max_tokens, self.held)
        self.running: list[tuple[str, int]] = []

    def view(self) -> WorkerView:
        return WorkerView(
            worker_id="w",
            role=Role.AGGREGATED,
            num_requests=len(self.running),
            num_tokens=sum(tokens for _, tokens in self.running),
            max_requests=self.use.max_requests,
            max_tokens=self.use.max_tokens,
        )

    def begin(self, tenant: str, num_choices: int, num_prompt: int, num_answer: int) -> bool:
        """Place as much of a request as its key may begin; return False if that is nothing."""
        self.shares.note(tenant)
        number = self.shares.num_to_begin(tenant, num_choices, num_prompt, num_answer, self.use)
        request = PlacementRequest(
            num_prompt_tokens=num_prompt, num_answer_tokens=num_answer, num_choices=max(1, number)
        )
        overdraws = self.shares.may_overdraw(tenant, number, request.num_tokens, self.use)
        wish = msgspec.structs.replace(request, may_overdraw=overdraws)
        if not number or place(WorkerViews.of([self.view()]), wish, 0) is None:
            return False
        for choice in range(number):
            tokens = num_answer if choice else num_prompt + num_answer
            self.running.append((tenant, tokens))
            self.held.add(tenant, 1, tokens)
        return True

    def end(self, number: int) -> None:
        """End the oldest choices."""
        for _ in range(min(number, len(self.running))):
            tenant, tokens = self.running.pop(0)
            self.held.add(tenant, -1, -tokens)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("hog", "hog", "small")),
            st.integers(1, 128),
            st.integers(1, 400),
            st.integers(1, 256),
            st.integers(0, 10),
        ),
        max_size=30,
    ),
    st.booleans(),
    st.integers(8, 256),
    st.integers(600, 40_000),
)
@settings(max_examples=300, deadline=None)
def test_a_short_request_of_a_key_that_holds_nothing_is_placed_at_once(
    asked: list[tuple[str, int, int, int, int]], was_there: bool, max_requests: int, max_tokens: int
) -> None:
    """A2: whatever the other key asks for, in whichever order its choices end; before, it waited for an end."""
    pool = Pool(max_requests, max_tokens)
    if was_there:
        pool.shares.note("small")
    for tenant, num_choices, num_prompt, num_answer, num_ended in asked:
        if tenant == "hog":
            pool.begin("hog", num_choices, num_prompt, num_answer)
        pool.end(num_ended)
        if tenant == "small" and "small" not in pool.held.num_requests:
            assert pool.begin("small", 1, 1, max(1, max_tokens // 16 - 1))
    pool.end(len(pool.running))
    held = pool.held
    assert not held.num_requests and not held.num_tokens and not held.all_requests and not held.all_tokens


def test_a_short_request_begins_beside_one_that_fills_the_pool() -> None:
    """A2: a single long choice of another key may take all tokens, and leaves no room free."""
    pool = Pool(16, 1600)
    assert pool.begin("hog", 1, 1590, 10)
    assert not pool.begin("small", 1, 200, 1), "it is not short"
    assert pool.begin("small", 1, 50, 3)
    assert not pool.begin("small", 1, 50, 3), "it holds one"


@given(st.integers(1, 128), st.integers(1, 400), st.integers(1, 256))
def test_every_choice_of_a_large_request_begins_in_the_end(
    num_choices: int, num_prompt: int, num_answer: int
) -> None:
    """A2: also while another key is there, and whatever the size of the choices."""
    pool = Pool(16, 2000)
    pool.shares.note("small")
    left = num_choices
    for _ in range(num_choices + 1):
        before = len(pool.running)
        if left and pool.begin("hog", left, num_prompt, num_answer):
            left -= len(pool.running) - before
        pool.end(1)
    assert left == 0


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


SMALL_POOL = pb.Credit(max_requests=256, max_tokens=16_000)


@pytest.mark.parametrize("was_there", [False, True])
@pytest.mark.parametrize("roles", [(Role.AGGREGATED,), (Role.PREFILL, Role.DECODE)])
async def test_streams_of_128_choices_leave_room_for_another_keys_short_request(
    roles: tuple[Role, ...], was_there: bool
) -> None:
    """A2: two requests of n = 128 that do not end; their choices begin as far as there is room."""
    async with running_cluster(Script(tokens=TOKENS), roles, api_keys=KEYS) as cluster:
        name = next(name for name in cluster.workers if "prefill" not in name)
        cluster.workers[name].stream.grant(SMALL_POOL)
        await cluster.until(lambda state: any(w["max_tokens"] == 16_000 for w in state["workers"]))
        if was_there:
            assert await ask(cluster, "bob") == 200
        cluster.script = lambda task: Script(tokens=TOKENS * 20, stall_at=max(1, task.first_index))
        hogs = [
            asyncio.create_task(ask(cluster, "alice", n=128, max_tokens=120, seed=number))
            for number in range(2)
        ]
        await cluster.until(lambda state: state["num_in_line"] > 1)
        cluster.script = lambda _: Script(tokens=TOKENS)
        async with asyncio.timeout(20):
            assert [await ask(cluster, "bob", max_tokens=3) for _ in range(3)] == [200] * 3
        for hog in hogs:
            hog.cancel()


async def test_choices_beyond_a_keys_share_follow_one_after_another_with_the_same_tokens() -> None:
    """A2: the answers do not depend on how many of the choices begin together."""

    def script(task: pb.Task) -> Script:
        seed = task.sampling.seed
        own = seed if task.num_choices == 1 else choice_seed(seed, task.choice)
        return Script(tokens=[97 + own % 26, *TOKENS])

    async def texts(credit: pb.Credit) -> list[str]:
        async with running_cluster(script, (Role.PREFILL, Role.DECODE), api_keys=KEYS) as cluster:
            cluster.workers["decode-0"].stream.grant(credit)
            await cluster.until(
                lambda state: any(w["max_requests"] == credit.max_requests for w in state["workers"])
            )
            headers = {"Authorization": "Bearer alice-secret-key"}
            body = {"prompt": "x", "n": 20, "seed": 5, "max_tokens": 9}
            status, answer = await cluster.post(TEXT, body, headers=headers)
            assert status == 200
            assert answer["usage"]["prompt_tokens"] == 1
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            starts = [call.task.num_choices for call in cluster.workers["decode-0"].received.decodes]
            assert (max(starts), len(starts)) == ((7, 14) if credit.max_requests == 8 else (20, 1))
            return [choice["text"] for choice in choices]

    assert await texts(pb.Credit(max_requests=8, max_tokens=2**20)) == await texts(
        pb.Credit(max_requests=255, max_tokens=2**20)
    )
