"""The order of the queue: priority, fairness between clients and between the requests of one, no starvation."""

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from router.admission.fair_queue import AGING_PERIOD, FairQueue, QueueOrder
from router.intake.request import BACKGROUND_PRIORITY

LANE = "lane"


def take(queue: FairQueue[str, str]) -> str:
    ticket = queue.heads()[0]
    queue.admit(ticket)
    return ticket.item


def names(queue: FairQueue[str, str]) -> list[str]:
    found = []
    while queue:
        found.append(take(queue))
    return found


def test_equal_requests_go_by_arrival() -> None:
    queue: FairQueue[str, str] = FairQueue()
    for number in (3, 1, 2, 0):
        queue.add(LANE, QueueOrder(arrival=float(number), family=str(number)), str(number))
    assert names(queue) == ["0", "1", "2", "3"]


def test_higher_priorities_go_first_and_those_that_were_begun_before_them() -> None:
    queue: FairQueue[str, str] = FairQueue()
    queue.add(LANE, QueueOrder(arrival=1.0, family="a"), "new")
    queue.add(LANE, QueueOrder(arrival=2.0, family="b", priority=5), "urgent")
    queue.add(LANE, QueueOrder(arrival=3.0, family="c", is_replay=True), "begun")
    assert names(queue) == ["urgent", "begun", "new"]


_ORDERS = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.integers(1, 50),
        st.sampled_from([0, 7, BACKGROUND_PRIORITY]),
        st.booleans(),
    ),
    max_size=20,
)


@given(_ORDERS, _ORDERS)
def test_a_request_that_does_not_wait_is_charged_as_one_that_is_taken(
    at_once: list[tuple[str, int, int, bool]], later: list[tuple[str, int, int, bool]]
) -> None:
    charged: FairQueue[str, str] = FairQueue()
    taken: FairQueue[str, str] = FairQueue()
    for tenant, cost, priority, is_replay in at_once:
        order = QueueOrder(tenant=tenant, cost=float(cost), priority=priority, is_replay=is_replay)
        charged.charge(order)
        taken.admit(taken.add(LANE, order, ""))
    for number, (tenant, cost, priority, is_replay) in enumerate(later):
        order = QueueOrder(
            tenant=tenant,
            cost=float(cost),
            priority=priority,
            is_replay=is_replay,
            family=str(number),
            arrival=float(number),
        )
        charged.add(LANE, order, str(number))
        taken.add(LANE, order, str(number))
    assert names(charged) == names(taken)


@given(st.integers(1, 4), st.integers(0, 60), st.integers(1, 2**31 - 1))
def test_a_low_priority_is_never_starved(num_hogs: int, num_before: int, priority: int) -> None:
    """M3: with hogs that always have requests of the highest priority, a bounded number of others overtakes it."""
    queue: FairQueue[str, str] = FairQueue()
    numbers = count()

    def hog() -> None:
        number = next(numbers)
        claim = QueueOrder(
            priority=priority, tenant=f"hog-{number % num_hogs}", family=str(number), arrival=float(number)
        )
        queue.add(LANE, claim, "hog")

    for _ in range(num_before):
        hog()
    queue.add(LANE, QueueOrder(tenant="quiet", family="quiet", arrival=float(next(numbers))), "quiet")
    num_passed = 0
    for _ in range(num_hogs):
        hog()
    while (name := take(queue)) != "quiet":
        assert name == "hog"
        num_passed += 1
        hog()
        assert num_passed <= AGING_PERIOD * (num_hogs + 1)


@given(st.integers(1, 40), st.integers(1, 2**31 - 1))
def test_a_low_priority_is_not_starved_without_keys_either(num_before: int, priority: int) -> None:
    """M3: all are one client then: those of the lower priority go by arrival at every eighth turn."""
    queue: FairQueue[str, str] = FairQueue()
    numbers = count()

    def hog() -> None:
        number = next(numbers)
        queue.add(LANE, QueueOrder(priority=priority, family=str(number), arrival=float(number)), "hog")

    for _ in range(num_before):
        hog()
    queue.add(LANE, QueueOrder(family="quiet", arrival=float(next(numbers))), "quiet")
    hog()
    num_passed = 0
    while take(queue) != "quiet":
        num_passed += 1
        hog()
        assert num_passed <= AGING_PERIOD * (num_before + 1)


def test_the_prompts_of_one_request_take_turns_with_other_requests() -> None:
    """M3: 1,024 prompts in one request do not delay other requests."""
    queue: FairQueue[str, str] = FairQueue()
    for _ in range(1024):
        queue.add(LANE, QueueOrder(family="many", arrival=0.0, cost=10.0), "many")
    for number in range(5):
        queue.add(LANE, QueueOrder(family=str(number), arrival=1.0 + number, cost=10.0), "one")
    first = [take(queue) for _ in range(12)]
    assert first.count("one") == 5
    assert len(queue) == 1024 + 5 - 12
    later = []
    for number in range(200):  # a steady stream of others does not starve the many either
        queue.add(LANE, QueueOrder(family=f"late-{number}", arrival=10.0 + number, cost=10.0), "late")
        later.append(take(queue))
    assert later.count("many") >= 10


def test_clients_share_by_cost_and_an_idle_one_saves_nothing_up() -> None:
    """M3: a client with ten times the load gets its share, no more."""
    queue: FairQueue[str, str] = FairQueue()
    for number in range(200):
        queue.add(LANE, QueueOrder(tenant="big", family=f"b{number}", arrival=0.0, cost=30.0), "big")
    for _ in range(50):
        take(queue)
    for number in range(100):
        queue.add(LANE, QueueOrder(tenant="small", family=f"s{number}", arrival=9.0, cost=10.0), "small")
    taken = [take(queue) for _ in range(80)]
    assert 55 <= taken.count("small") <= 62  # three small ones for each big one


def test_background_work_is_admitted_when_no_other_request_waits() -> None:
    """M3: the lowest priority is never ahead of an interactive request, not even at the turns that ignore priorities."""
    queue: FairQueue[str, str] = FairQueue()
    for number in range(10):
        queue.add(
            LANE, QueueOrder(priority=BACKGROUND_PRIORITY, tenant="batch", family=str(number)), "background"
        )
    for number in range(3 * AGING_PERIOD):
        queue.add(LANE, QueueOrder(tenant="user", family=str(number), arrival=float(number)), "user")
    assert names(queue) == ["user"] * 3 * AGING_PERIOD + ["background"] * 10


def test_a_clients_batch_does_not_put_its_other_requests_back() -> None:
    """M3: background work takes nothing of the share of the client that it belongs to."""
    queue: FairQueue[str, str] = FairQueue()
    for number in range(10):
        batch = QueueOrder(priority=BACKGROUND_PRIORITY, tenant="a", family=f"batch-{number}", cost=1000.0)
        queue.add(LANE, batch, "background")
        assert take(queue) == "background"
    for number in range(4):
        for tenant in ("b", "a"):
            arrival = float(2 * number + (tenant == "a"))
            queue.add(
                LANE,
                QueueOrder(tenant=tenant, family=f"{tenant}{number}", arrival=arrival, cost=10.0),
                tenant,
            )
    assert names(queue) == ["b", "a"] * 4


def test_lanes_have_heads_of_their_own_in_one_order() -> None:
    queue: FairQueue[str, str] = FairQueue()
    queue.add("answers", QueueOrder(arrival=2.0, family="a"), "answer")
    queue.add("embeddings", QueueOrder(arrival=1.0, family="b"), "embedding")
    assert [head.lane for head in queue.heads()] == ["embeddings", "answers"]
    ticket = queue.heads()[1]
    queue.move(ticket, "embeddings")
    assert [head.lane for head in queue.heads()] == ["embeddings"]
    assert names(queue) == ["embedding", "answer"]


@given(
    st.lists(
        st.tuples(st.sampled_from("+-x"), st.sampled_from("abc"), st.sampled_from("uv"), st.integers(-1, 1)),
        max_size=60,
    )
)
def test_the_queue_holds_what_was_added_and_not_taken(steps: list[tuple[str, str, str, int]]) -> None:
    queue: FairQueue[str, str] = FairQueue()
    held: set[str] = set()
    for number, (step, tenant, family, priority) in enumerate(steps):
        if step == "+":
            claim = QueueOrder(priority=priority, tenant=tenant, family=family, arrival=float(number))
            queue.add(tenant, claim, str(number))
            held.add(str(number))
        elif queue:
            ticket = queue.heads()[-1]
            (queue.admit if step == "-" else queue.discard)(ticket)
            held.remove(ticket.item)
        assert {ticket.item for ticket in queue} == held
        assert len(queue) == len(held)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(-2, 2)), max_size=20),
    st.sets(st.sampled_from("abc")),
)
def test_requests_of_clients_that_may_not_start_are_overtaken(
    asked: list[tuple[str, int]], held_back: set[str]
) -> None:
    """M3: the others keep their order, and if only such clients wait, no request is admitted."""
    queue: FairQueue[str, str] = FairQueue()
    others: FairQueue[str, str] = FairQueue()
    for number, (tenant, priority) in enumerate(asked):
        claim = QueueOrder(priority=priority, tenant=tenant, family=str(number), arrival=float(number))
        queue.add(LANE, claim, str(number))
        if tenant not in held_back:
            others.add(LANE, claim, str(number))
    while others:
        (ticket,) = queue.heads(lambda ticket: ticket.order.tenant not in held_back)
        queue.admit(ticket)
        assert ticket.item == take(others)
    assert not queue.heads(lambda ticket: ticket.order.tenant not in held_back)
