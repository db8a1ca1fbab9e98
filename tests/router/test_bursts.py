"""M3: a burst of one client's requests lets others in between: in the event loop, in the queue, at the workers."""

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.identity import Role
from router.admission import reservation
from router.admission.reservation import StartLimiter
from router.concurrency import rest_after
from router.intake import limits
from router.intake.round_robin import RoundRobin
from tests.fakes.router.script import Script
from tests.router.cluster import running_cluster
from tests.text.tiny_model import END


async def turns_of(*names: str) -> list[tuple[int, str]]:
    """Let requests that arrive together take turns; return the round in which each begins. A name begins with its client."""
    taking, begun = RoundRobin(), list[tuple[int, str]]()
    rounds = 0

    async def ask(name: str) -> None:
        await taking.wait_turn(name[0])
        begun.append((rounds, name))

    async def count() -> None:
        nonlocal rounds
        while True:
            await asyncio.sleep(0)
            rounds += 1

    counting = asyncio.create_task(count())
    async with asyncio.TaskGroup() as tasks:
        for name in names:
            tasks.create_task(ask(name))
    counting.cancel()
    return begun


async def test_one_request_of_each_client_begins_in_a_round() -> None:
    """A client's requests begin in order, one a round; another client does not wait behind them."""
    begun = await turns_of("b0", "m0", "m1", "m2", "m3", "a0")
    assert [name for _, name in begun if name[0] == "m"] == ["m0", "m1", "m2", "m3"]
    when = {name: number for number, name in begun}
    assert when["a0"] == when["m0"] and len({when[f"m{number}"] for number in range(4)}) == 4


async def test_a_few_requests_of_a_client_that_is_alone_begin_in_a_round() -> None:
    names = [f"m{number}" for number in range(20)]
    begun = await turns_of(*names)
    assert [name for _, name in begun] == names
    in_a_round = Counter(when for when, _ in begun)
    assert sorted(in_a_round.values()) == [4, 8, 8]


async def test_a_client_rests_after_its_turn_while_others_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop was busy for an hour, so the next turn is far; another client begins at once, and a lone one never rests."""
    monkeypatch.setattr(limits, "MAX_PAUSE_SECONDS", 3600.0)
    now = {"clock": 0.0, "cpu": 0.0}
    taking = RoundRobin(lambda: now["clock"], lambda: now["cpu"])
    for _ in range(3):
        now["cpu"] += 3600
        await asyncio.wait_for(taking.wait_turn("m"), 5)
    await asyncio.sleep(0.001)
    now["cpu"] += 3600
    await taking.wait_turn("a")
    await taking.wait_turn("m")
    waiting = asyncio.create_task(taking.wait_turn("m"))
    await asyncio.sleep(0.001)
    assert not waiting.done()
    await asyncio.wait_for(taking.wait_turn("b"), 5)
    waiting.cancel()


async def test_a_cancelled_request_uses_up_no_turn() -> None:
    taking = RoundRobin()
    await taking.wait_turn("m")
    waiting = [asyncio.create_task(taking.wait_turn("m")) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    async with asyncio.timeout(5):
        await asyncio.gather(*waiting[1:])
    await asyncio.sleep(0.01)
    await asyncio.wait_for(taking.wait_turn("m"), 5)


async def test_long_work_yields_to_other_tasks() -> None:
    """Something else runs after every few items."""
    others = 0

    async def other() -> None:
        nonlocal others
        while True:
            others += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    for number in range(1, 101):
        await rest_after(number)
    task.cancel()
    assert others >= 20


class Orders:
    """Orders to workers that are sent when a test sends them."""

    def __init__(self) -> None:
        self.num_free = 0
        self.starts = StartLimiter(self.count)
        self.sent: list[Callable[[], None]] = []

    def count(self) -> None:
        self.num_free += 1

    def start(self, client: str, count: int = 2, *, is_alone: bool = True) -> None:
        start = self.starts.start(client, is_alone=is_alone)
        start.num_orders = count
        self.sent += [start.on_order_sent] * count


@pytest.fixture
async def orders() -> Orders:
    return Orders()


async def test_the_next_request_starts_when_the_orders_of_one_were_sent(orders: Orders) -> None:
    while orders.starts.may_start("m"):
        orders.start("m")
    assert orders.starts.may_start("a")
    orders.sent[0]()
    assert not orders.starts.may_start("m")
    assert not orders.num_free
    orders.sent[1]()
    assert orders.starts.may_start("m")
    assert [orders.num_free] == [1]


async def test_with_more_workers_more_requests_start(orders: Orders) -> None:
    orders.starts.num_workers = 3
    while orders.starts.may_start("m"):
        orders.start("m", 1)
    assert len(orders.sent) == 24


async def test_fewer_requests_start_beside_other_clients(orders: Orders) -> None:
    orders.start("m", 1)
    orders.start("m", 1, is_alone=False)
    while orders.starts.may_start("m"):
        orders.start("m", 1, is_alone=False)
    assert len(orders.sent) == 4


@pytest.mark.parametrize("is_alone", [True, False])
async def test_a_client_that_is_not_alone_rests_between_starts(
    orders: Orders, monkeypatch: pytest.MonkeyPatch, is_alone: bool
) -> None:
    monkeypatch.setattr(reservation, "pause_seconds", lambda _: 3600.0)
    while orders.starts.may_start("m"):
        orders.start("m", is_alone=is_alone)
    for sent in orders.sent:
        sent()
    assert orders.starts.may_start("m") is is_alone and orders.starts.may_start("a")


async def test_a_worker_that_does_not_read_holds_up_its_client_for_a_moment_only(orders: Orders) -> None:
    while orders.starts.may_start("m"):
        orders.start("m")
    async with asyncio.timeout(5):
        while not orders.starts.may_start("m"):
            await asyncio.sleep(0.01)
    assert orders.num_free
    for sent in orders.sent:  # a late one must not be counted again
        sent()
    num_started = 0
    while orders.starts.may_start("m"):
        orders.start("m")
        num_started += 1
    assert num_started == 8


@given(st.lists(st.sampled_from(["start", "sent", "late"]), max_size=40))
def test_starts_are_counted_to_zero(events: list[str]) -> None:
    async def run() -> None:
        orders = Orders()
        for event in events:
            if event == "start" and orders.starts.may_start("m"):
                orders.start("m", 1)
            elif event == "sent" and orders.sent:
                orders.sent.pop()()
            else:
                await asyncio.sleep(0)
        for sent in orders.sent:
            sent()
        assert not orders.starts._starting

    asyncio.run(run())


async def test_a_burst_of_one_client_is_answered_whole() -> None:
    """Sixty requests at once: all are bound, none is lost."""
    async with running_cluster(Script(tokens=[END]), (Role.PREFILL, Role.DECODE)) as cluster:
        answers = await asyncio.gather(
            *(cluster.post("/v1/completions", {"prompt": "hello"}) for _ in range(60))
        )
    assert {status for status, _ in answers} == {200}
