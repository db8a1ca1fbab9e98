"""Credit between the decision to admit a request and the beginning of its legs."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import WorkerLostError
from contract.identity import Role
from contract.layout import KVLayout
from contract.membership import Credit, Registration
from contract.sampling import SamplingParams
from protos import WORKER_PROTOCOL_MAX
from router.admission.admission_queue import AdmissionQueue
from router.admission.fair_queue import QueueOrder
from router.admission.reservation import _MOST_ALONE, Reservation
from router.admission.unreachable_pairs import UnreachablePairs
from router.attempts.attempt import Attempt, begin
from router.attempts.attempt_legs import AttemptLegs
from router.attempts.current_attempt import CurrentAttempt
from router.attempts.leg_outcome import LegReport
from router.attempts.leg_requests import AttemptTask
from router.concurrency import ChangeSignal
from router.intake.prepared_request import PreparedRequest
from router.routing.legs import LEG_KINDS
from router.routing.policy import PlacementRequest
from router.routing.running_shares import RunningShares
from router.routing.views import WorkerView
from router.tokens.delivery import AttemptOutput
from router.tokens.inbox import UnreadBytes
from router.workers.attached_worker import AttachedWorker
from router.workers.order_stream import OrderStream
from router.workers.registry import Registry
from tests.fakes.router.worker import kv_layout
from wire.messages import from_proto

REQUEST = PlacementRequest(num_prompt_tokens=10, num_answer_tokens=5)


class Queue:
    """An admission queue with one prefill and one decode worker, which take ``max_requests`` each."""

    def __init__(self, max_requests: int = 1) -> None:
        self.num_changes = 0
        self.changes = changes = ChangeSignal()
        self.registry = Registry(changes)
        self.queue = AdmissionQueue(self.registry, changes, UnreachablePairs(), RunningShares(1.0), 30.0)
        for role in (Role.PREFILL, Role.DECODE):
            self.attach(role).capacity.grant(Credit(max_requests=max_requests, max_tokens=1000))
        changes.add_room_listener(self._count)

    def _count(self) -> None:
        self.num_changes += 1

    def count_passes(self) -> list[None]:
        """Return a list that gets an item for each pass of the queue from now on."""
        passes: list[None] = []
        admit = self.queue._admit

        def counted() -> None:
            passes.append(None)
            admit()

        self.queue._admit = counted  # type: ignore[method-assign]
        return passes

    def known_view(self, worker_id: str) -> WorkerView:
        """Return the view that was made last, without making a new one."""
        found = self.registry._views.get(worker_id)
        assert found
        return found.view

    def attach(self, role: Role) -> AttachedWorker:
        registration = Registration(
            protocol_min=WORKER_PROTOCOL_MAX,
            protocol_max=WORKER_PROTOCOL_MAX,
            worker_id=role.value,
            boot_id="boot",
            role=role.value,
            address="a:1",
            control_address="a:2",
            model_fingerprint="m@float32",
            kv_layout=from_proto(KVLayout, kv_layout()),
            max_model_len=1000,
        )
        worker = self.registry.new_worker(
            registration, cast(Any, "nothing is called"), OrderStream(role.value, 10.0)
        )
        self.registry.attach(worker)
        return worker

    @property
    def held(self) -> list[tuple[int, int]]:
        """Requests and tokens that count against the credit of each worker."""
        return [(view.num_requests, view.num_tokens) for view in self.registry.views]

    async def reserve(
        self, stack: AsyncExitStack, request: PlacementRequest = REQUEST, tenant: str = "a"
    ) -> Reservation:
        return stack.enter_context(await self.queue.reserve(request, QueueOrder(tenant=tenant)))

    def begin(self, reservation: Reservation, num_choices: int = 1) -> list[Attempt]:
        """Begin an attempt of each choice on the reserved workers."""
        request = PreparedRequest(
            request_id="r",
            prompt_token_ids=[1] * 10,
            priority=0,
            cache_salt="",
            arrival=0.0,
            deadline=time.monotonic() + 60,
            sampling=SamplingParams(max_tokens=5),
        )
        unread = UnreadBytes(1000, 10_000)
        attempts = []
        for choice in range(num_choices):
            task = AttemptTask(request.of_choice(choice))
            legs = AttemptLegs.of(reservation, LEG_KINDS)
            with unread.open("a") as account:
                attempts.append(
                    Attempt(
                        task,
                        legs,
                        LegReport(),
                        AttemptOutput(0, account, 1000, lambda batch: None),
                        CurrentAttempt(),
                    )
                )
        begin(attempts, reservation)
        return attempts


@pytest.fixture
async def queue() -> AsyncIterator[Queue]:
    made = Queue()
    yield made
    made.queue.close()


async def next_rounds() -> None:
    """Let the event loop do what is ready, and what follows from it."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_prompt_counts_once_and_each_answer_where_it_ends() -> None:
    made = Queue(max_requests=3)
    request = PlacementRequest(num_prompt_tokens=10, num_answer_tokens=5, num_choices=3)
    async with AsyncExitStack() as stack:
        await made.reserve(stack, request)
        assert made.held == [(3, 10), (3, 25)]
    assert made.held == [(0, 0), (0, 0)]


async def test_a_request_that_need_not_wait_is_not_queued(queue: Queue) -> None:
    """It is bound without a pass of the queue. The next one has no room: it waits, and is admitted by a pass."""
    passes = queue.count_passes()
    async with AsyncExitStack() as first, AsyncExitStack() as second:
        await queue.reserve(first)
        assert (len(queue.queue), passes) == (0, [])
        waiting = asyncio.create_task(queue.reserve(second))
        await asyncio.sleep(0)
        assert len(queue.queue) == 1
        await first.aclose()
        await asyncio.wait_for(waiting, 5)
        assert len(queue.queue) == 0 and passes


async def test_a_request_leaves_the_queue_at_its_deadline(queue: Queue) -> None:
    """It holds nothing then, and the next one is admitted when there is room."""
    async with AsyncExitStack() as first, AsyncExitStack() as second:
        await queue.reserve(first)
        with pytest.raises(TimeoutError):
            await queue.queue.reserve(REQUEST, QueueOrder(tenant="b"), time.monotonic())
        assert len(queue.queue) == 0
        await first.aclose()
        await asyncio.wait_for(queue.reserve(second), 5)
        assert queue.held == [(1, 10), (1, 15)]


async def test_legs_take_the_credit_over_and_release_it(queue: Queue) -> None:
    """Nothing is counted twice, and the block's end takes nothing from the legs."""
    async with AsyncExitStack() as stack:
        reservation = await queue.reserve(stack)
        reserved = queue.held
        (attempt,) = queue.begin(reservation)
        assert queue.held == reserved == [(1, 10), (1, 15)]
    assert queue.held == reserved
    attempt.close()
    attempt.close()
    assert queue.held == [(0, 0), (0, 0)]


async def test_a_later_request_is_not_placed_on_reserved_credit(queue: Queue) -> None:
    """Both are decided on in one pass, before the first one has begun its legs."""
    async with AsyncExitStack() as first, AsyncExitStack() as second:
        reserving = [asyncio.create_task(queue.reserve(stack)) for stack in (first, second)]
        await next_rounds()
        assert [task.done() for task in reserving] == [True, False]
        assert queue.held == [(1, 10), (1, 15)]
        assert len(queue.queue) == 1
        await first.aclose()
        await reserving[1]
        assert queue.held == [(1, 10), (1, 15)]


async def test_a_release_admits_the_next_request_in_one_pass(queue: Queue) -> None:
    """The credit of two workers comes back, and the queue looks once; the second release gives nothing back."""
    async with AsyncExitStack() as first, AsyncExitStack() as second:
        reservation = await queue.reserve(first)
        waiting = asyncio.create_task(queue.reserve(second))
        await next_rounds()
        passes = queue.count_passes()
        queue.num_changes = 0
        reservation.release()
        assert queue.num_changes == 2
        assert not waiting.done(), "the queue is not served from within the release"
        reservation.release()
        assert queue.num_changes == 2
        await next_rounds()
        assert waiting.done()
        assert len(passes) == 1


@pytest.mark.parametrize("is_before_decision", [True, False])
async def test_a_cancelled_request_holds_no_credit(queue: Queue, is_before_decision: bool) -> None:
    """Also between the decision and the next step of its task, when only the queue can release it."""
    async with AsyncExitStack() as first, AsyncExitStack() as second:
        reservation = await queue.reserve(first)
        waiting = asyncio.create_task(queue.reserve(second))
        await next_rounds()
        if not is_before_decision:
            reservation.release()
            queue.queue._admit()
            assert queue.held == [(1, 10), (1, 15)], "it is reserved for the second one"
            assert not waiting.done()
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        reservation.release()
        assert queue.held == [(0, 0), (0, 0)]
        assert len(queue.queue) == 0
        await queue.reserve(second)


@pytest.mark.parametrize("lost", [Role.PREFILL, Role.DECODE])
async def test_a_worker_that_is_lost_before_the_legs_begin_fails_their_attempts(lost: Role) -> None:
    """The failure names the lost worker; the other one receives no order, and gets its credit back."""
    made = Queue(max_requests=2)
    request = PlacementRequest(num_prompt_tokens=10, num_answer_tokens=5, num_choices=2)
    async with AsyncExitStack() as stack:
        reservation = await made.reserve(stack, request)
        worker = made.registry.get(lost.value)
        made.registry.detach(worker, "its stream closed")
        successor = made.attach(lost)
        for attempt in made.begin(reservation, num_choices=2):
            with pytest.raises(WorkerLostError, match=f"worker {lost.value} was lost"):
                await attempt.next()
            assert attempt.failure and attempt.failure.failed_workers == {worker}
            attempt.close()
    assert not any(each.orders.next_message() for each in [worker, *made.registry.workers])
    assert made.held == [(0, 0), (0, 0)]
    assert (worker.capacity.num_requests, successor.capacity.num_requests) == (0, 0)


@pytest.mark.parametrize("is_begun", [True, False])
async def test_a_reservation_counts_as_a_start(monkeypatch: pytest.MonkeyPatch, is_begun: bool) -> None:
    """A client's next request waits while a few are decided on, until the orders of one are sent or one is given up."""
    monkeypatch.setattr("router.admission.reservation._TIMEOUT_SECONDS", 60.0)
    made = Queue(max_requests=100)
    async with AsyncExitStack() as stack, AsyncExitStack() as late:
        for _ in range(_MOST_ALONE):
            reservation = await made.reserve(stack)
        following = asyncio.create_task(made.reserve(late))
        await next_rounds()
        assert not following.done()
        if is_begun:
            made.begin(reservation)
            for worker in made.registry.workers:
                taken = worker.orders.next_message()
                assert taken
                await next_rounds()
                assert not following.done()
                for sent in taken[1]:
                    sent()
        else:
            reservation.release()
        await asyncio.wait_for(following, 5)


@given(st.lists(st.sampled_from(["reserve", "begin", "release", "close"]), max_size=30))
def test_all_credit_comes_back(steps: list[str]) -> None:
    """In any order of steps, exactly the open reservations and attempts hold credit, and in the end none does."""

    async def run() -> None:
        made = Queue(max_requests=100)
        reserved: list[tuple[AsyncExitStack, Reservation]] = []
        attempts: list[Attempt] = []
        for number, step in enumerate(steps):
            if step == "reserve":
                stack = AsyncExitStack()
                reservation = await made.reserve(
                    stack, tenant=f"t{number}"
                )  # none waits for another one's start
                reserved.append((stack, reservation))
            elif step == "close" and attempts:
                attempts.pop().close()
            elif reserved and step in ("begin", "release"):
                stack, reservation = reserved.pop()
                if step == "begin":
                    attempts += made.begin(reservation)
                await stack.aclose()
            num_open = len(reserved) + len(attempts)
            assert made.held == [(num_open, 10 * num_open), (num_open, 15 * num_open)]
        for stack, _ in reserved:
            await stack.aclose()
        for attempt in attempts:
            attempt.close()
        assert made.held == [(0, 0), (0, 0)]

    asyncio.run(run())
