"""The views of workers, which are made anew only for workers that have changed, and the decisions that read them."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from itertools import pairwise, product
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from contract.identity import Role
from contract.layout import KVLayout
from contract.membership import Credit, Load, Registration
from protos import WORKER_PROTOCOL_MAX
from router.concurrency import ChangeSignal
from router.routing.legs import EMBEDDING, GENERATION, Placement, RequestPlan
from router.routing.policy import PlacementRequest, awaited, candidates, fits, place
from router.routing.running_shares import RecentClients
from router.routing.views import WorkerSize, WorkerView, WorkerViews, is_full
from router.workers.attached_worker import AttachedWorker
from router.workers.capacity import CreditHold
from router.workers.order_stream import OrderStream
from router.workers.registry import Registry
from tests.fakes.router.worker import kv_layout
from tests.router.test_reservations import Queue, next_rounds
from wire.messages import from_proto

P, D, B = Role.PREFILL, Role.DECODE, Role.AGGREGATED
LAYOUT = from_proto(KVLayout, kv_layout())
NAMES = st.sampled_from(["w0", "w1", "w2", "w3"])
CLIENTS = st.sampled_from(["alice", "bob"])


def registration(worker_id: str, boot_id: str, role: Role, length: int) -> Registration:
    return Registration(
        protocol_min=WORKER_PROTOCOL_MAX,
        protocol_max=WORKER_PROTOCOL_MAX,
        worker_id=worker_id,
        boot_id=boot_id,
        role=role.value,
        address="a:1",
        control_address="a:2",
        model_fingerprint="m@float32",
        kv_layout=LAYOUT,
        max_model_len=length,
        num_blocks=length // 8,
    )


class ViewsStayFresh(RuleBasedStateMachine):
    """After every event of a worker, in any order, the registry's views are those that one would make now.

    Workers that were detached still receive what arrives late: credit that comes back, loads, credits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.signal = ChangeSignal()
        self.registry = Registry(self.signal)
        self.num_boots = 0
        self.known: list[AttachedWorker] = []
        self.holds: list[tuple[Role, str, int, CreditHold]] = []
        self.had_credit: dict[str, bool] = {}
        self.sizes: dict[str, WorkerSize] = {}
        self.version = self.registry.views.version
        self.notified = False
        self.signal.add_listener(self._on_change)

    def _on_change(self) -> None:
        self.notified = True

    @rule(name=NAMES, role=st.sampled_from([P, D, B]), length=st.sampled_from([64, 128]))
    def attach(self, name: str, role: Role, length: int) -> None:
        self.num_boots += 1
        holder = next((each for each in self.registry.workers if each.name == name), None)
        boot_id = holder.registration.boot_id if holder else f"boot-{self.num_boots}"
        worker = self.registry.new_worker(
            registration(name, boot_id, role, length), cast(Any, "nothing is called"), OrderStream("w", 10.0)
        )
        self.registry.attach(worker)
        self.known.append(worker)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def detach(self, data: st.DataObject) -> None:
        self.registry.detach(data.draw(st.sampled_from(self.known)), "its stream closed")

    @precondition(lambda self: self.known)
    @rule(
        data=st.data(),
        max_requests=st.integers(0, 3),
        max_tokens=st.integers(0, 100),
        is_unsettled=st.booleans(),
    )
    def grant(self, data: st.DataObject, max_requests: int, max_tokens: int, *, is_unsettled: bool) -> None:
        data.draw(st.sampled_from(self.known)).capacity.grant(
            Credit(max_requests=max_requests, max_tokens=max_tokens, is_unsettled=is_unsettled)
        )

    @precondition(lambda self: self.known)
    @rule(data=st.data(), role=st.sampled_from([P, D, B]))
    def set_role(self, data: st.DataObject, role: Role) -> None:
        self.registry.set_role(data.draw(st.sampled_from(self.known)), role)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), running=st.integers(0, 9), usage=st.floats(0, 1))
    def report(self, data: st.DataObject, running: int, usage: float) -> None:
        data.draw(st.sampled_from(self.known)).capacity.report_load(
            Load(num_running=running, num_waiting=running // 2, kv_cache_usage=usage)
        )

    @precondition(lambda self: self.known)
    @rule(data=st.data(), client=CLIENTS, num_tokens=st.integers(0, 50))
    def hold(self, data: st.DataObject, client: str, num_tokens: int) -> None:
        worker = data.draw(st.sampled_from(self.known))
        self.holds.append((worker.role, client, num_tokens, worker.capacity.hold(client, num_tokens)))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        _, _, _, hold = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        hold.release()
        hold.release()

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.known)).leave()

    @rule()
    def read(self) -> None:
        """Make the views now, so that later events find some that are fresh."""
        self.registry.check_integrity()
        views = self.registry.views
        views.members(frozenset(views.sizes))
        sizes = {view.worker_id: view.size for view in views}
        assert sizes == self.sizes or views.version != self.version
        self.version = views.version
        self.sizes = sizes
        self.had_credit = self._has_credit()
        self.notified = False

    def _has_credit(self) -> dict[str, bool]:
        return {worker.name: worker.has_credit for worker in self.registry.workers}

    @invariant()
    def is_a_change_of_credit_reported(self) -> None:
        """A task that has read the views and waits for a worker that takes requests is woken when there is one."""
        assert self.notified or self._has_credit() == self.had_credit

    @invariant()
    def are_the_counts_of_clients_right(self) -> None:
        decoding = [(client, tokens) for role, client, tokens, _ in self.holds if role is not P]
        use = self.registry.held
        assert use.num_requests == Counter(client for client, _ in decoding)
        tokens: Counter[str] = Counter()
        for client, num_tokens in decoding:
            tokens[client] += num_tokens
        assert +use.num_tokens == +tokens

    def teardown(self) -> None:
        self.registry.check_integrity()


TestViewsStayFresh = ViewsStayFresh.TestCase


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[WorkerView], PlacementRequest]:
    """Draw workers in all states, and a request with all kinds of history."""
    views = [
        WorkerView(
            worker_id=f"w{number}",
            role=draw(st.sampled_from([P, D, B])),
            num_requests=draw(st.integers(0, 3)),
            num_tokens=draw(st.sampled_from([0, 10, 10, 40])),
            max_requests=draw(st.integers(0, 4)),
            max_tokens=draw(st.sampled_from([20, 60])),
            num_running=draw(st.integers(0, 1)),
            kv_cache_usage=draw(st.sampled_from([0.0, 0.5, 0.96])),
            max_length=draw(st.sampled_from([20, 60])),
            pool_tokens=draw(st.sampled_from([15, 60])),
        )
        for number in range(draw(st.integers(0, 6)))
    ]
    ids = st.sampled_from([f"w{number}" for number in range(6)])
    prompt, answer = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    request = PlacementRequest(
        num_prompt_tokens=prompt,
        num_answer_tokens=answer,
        plan=draw(st.sampled_from([GENERATION, EMBEDDING])),
        max_length=draw(st.sampled_from([0, prompt + answer])),
        prefer=draw(st.none() | ids),
        avoid=draw(st.frozensets(ids, max_size=3)),
        too_small=draw(st.frozensets(ids, max_size=2)),
        is_replay=draw(st.booleans()),
        is_local=draw(st.booleans()),
    )
    return views, request


class Oracle:
    """The rules of placement, read from a list of all workers; slow, and written another way than the policy."""

    def __init__(
        self, views: list[WorkerView], request: PlacementRequest, unreachable: frozenset[tuple[str, str]]
    ) -> None:
        self.request = request
        self.unreachable = unreachable
        self.able = [
            view for view in views if fits(view.size, request) and view.worker_id not in request.too_small
        ]
        self.plan = self._plan(views)
        trusted = [view for view in self.able if view.worker_id not in request.avoid]
        roles = {view.role for view in trusted}
        self.trusted = trusted if B in roles or roles >= set(request.plan.roles) else self.able

    def _plan(self, views: list[WorkerView]) -> RequestPlan:
        plan = self.request.plan
        if plan.fallback is None:
            return plan
        is_able = any(view.role is plan.roles[0] for view in self.able)
        is_attached = any(view.role is plan.roles[0] and view.max_requests for view in views)
        if self.request.is_local or (not is_able and (self.request.is_replay or is_attached)):
            return plan.fallback
        return plan

    def of_role(self, role: Role) -> list[WorkerView]:
        found = [view for view in self.trusted if view.role is role]
        return [view for view in found if view.worker_id not in self.request.avoid] or found

    def with_room(self, role: Role) -> list[WorkerView]:
        return [view for view in self.of_role(role) if self.has_room(view)]

    def has_room(self, view: WorkerView) -> bool:
        if view.num_requests == 0 < view.max_requests:
            return True
        if view.num_requests >= view.max_requests:
            return False
        if view.role is P:
            return view.num_tokens < view.max_tokens
        needed = view.num_tokens + self.request.num_tokens
        return needed <= view.max_tokens and not is_full(view.kv_cache_usage)

    def rank(self, view: WorkerView) -> tuple[object, ...]:
        is_preferred = view.role is P and view.worker_id == self.request.prefer
        return not is_preferred, view.load

    def best(self) -> set[tuple[str, ...]]:
        """Return every choice of workers that the rules allow; those of equal load are all allowed."""
        pools = [self.with_room(role) for role in self.plan.roles]
        choices = [
            choice
            for choice in product(*pools)
            if self.unreachable.isdisjoint(pairwise(view.worker_id for view in choice))
        ]
        least = min(([self.rank(view) for view in choice[::-1]] for choice in choices), default=None)
        best = [choice for choice in choices if [self.rank(view) for view in choice[::-1]] == least]
        alone = self.with_room(B)
        lightest = [view for view in alone if view.load == min(each.load for each in alone)]
        if best and not self._is_alone_better(lightest, best[0]):
            return {tuple(view.worker_id for view in choice) for choice in best}
        if lightest:
            return {(view.worker_id,) for view in lightest}
        if len(self.plan.legs) == 1:
            return set()
        senders = {view.worker_id for view in self.of_role(self.plan.roles[-2])}
        reached = [
            view
            for view in self.with_room(self.plan.roles[-1])
            if senders and senders <= {p for p, d in self.unreachable if d == view.worker_id}
        ]
        return {(v.worker_id,) for v in reached if v.load == min(each.load for each in reached)}

    def _is_alone_better(self, lightest: list[WorkerView], chosen: tuple[WorkerView, ...]) -> bool:
        if not lightest or self.plan.prefers_legs:
            return False
        if len(chosen) == 1:
            avoid = self.request.avoid
            one, other = lightest[0], chosen[0]
            return (one.worker_id in avoid, one.load) < (other.worker_id in avoid, other.load)
        return lightest[0].num_tokens < max(view.num_tokens for view in chosen)


PAIRS = st.frozensets(st.tuples(*[st.sampled_from([f"w{number}" for number in range(6)])] * 2), max_size=8)


def workers_of(placement: Placement) -> tuple[str, ...]:
    return tuple(leg.worker for leg in placement.legs)


@given(worlds(), st.integers(0, 7), st.just(frozenset()) | PAIRS)
def test_a_decision_over_ordered_views_is_that_of_the_rules(
    world: tuple[list[WorkerView], PlacementRequest], turn: int, unreachable: frozenset[tuple[str, str]]
) -> None:
    views, request = world
    allowed = Oracle(views, request, unreachable).best()
    placement = place(WorkerViews.of(views), request, turn, unreachable)
    assert (workers_of(placement) in allowed) if placement else not allowed


@given(worlds(), st.integers(0, 7), st.data())
def test_taken_workers_count_as_full(
    world: tuple[list[WorkerView], PlacementRequest], turn: int, data: st.DataObject
) -> None:
    views, request = world
    taken = data.draw(st.frozensets(st.sampled_from([f"w{number}" for number in range(6)])))
    full = [
        msgspec.structs.replace(view, num_requests=max(view.num_requests, view.max_requests, 1))
        if view.worker_id in taken
        else view
        for view in views
    ]
    placement = place(WorkerViews.of(views), request, turn, taken=taken)
    allowed = Oracle(full, request, frozenset()).best()
    assert (workers_of(placement) in allowed) if placement else not allowed
    assert awaited(WorkerViews.of(views), request, taken) == awaited(WorkerViews.of(full), request)


@given(worlds())
def test_what_a_request_fits_and_waits_for_is_that_of_each_worker(
    world: tuple[list[WorkerView], PlacementRequest],
) -> None:
    views, request = world
    oracle = Oracle(views, request, frozenset())
    ends = {view.worker_id for view in oracle.able if view.role in request.plan.end_roles}
    earlier = [view for view in oracle.able if view.role in request.plan.roles[:-1]]
    able = {view.worker_id for view in oracle.able if view.role in (*request.plan.roles, B)}
    assert candidates(WorkerViews.of(views), request) == (able if ends else set())
    waits = set() if any(map(oracle.has_room, earlier)) else {view.worker_id for view in earlier}
    assert awaited(WorkerViews.of(views), request) == ends | waits


def test_equal_workers_take_turns_when_one_of_them_is_full() -> None:
    views = [
        WorkerView(worker_id=f"w{n}", role=B, max_requests=0 if n == 1 else 1, max_tokens=9) for n in range(4)
    ]
    request = PlacementRequest(num_prompt_tokens=1, num_answer_tokens=1)
    chosen = [place(WorkerViews.of(views), request, turn) for turn in range(8)]
    assert {placement.end for placement in chosen if placement} == {"w0", "w2", "w3"}


async def test_an_answer_that_ends_causes_no_work_while_nothing_waits() -> None:
    """The queue makes no pass, no view is made, and tasks that wait for workers or the model are not woken."""
    made = Queue(max_requests=2)
    async with AsyncExitStack() as stack:
        reservation = await made.reserve(stack)
        await next_rounds()
        views = {view.worker_id: view for view in made.registry.views}
        waiting = asyncio.create_task(made.changes.next.wait())
        passes = made.count_passes()
        reservation.release()
        await next_rounds()
        assert passes == []
        assert not waiting.done()
        assert all(made.known_view(name) is view for name, view in views.items())
        waiting.cancel()
    assert made.held == [(0, 0), (0, 0)]
    made.queue.close()


async def test_a_decision_replaces_the_views_of_changed_workers_only() -> None:
    made = Queue(max_requests=4)
    other = made.attach(Role.AGGREGATED)
    before = {view.worker_id: view for view in made.registry.views}
    async with AsyncExitStack() as stack:
        await made.reserve(stack)
        after = {view.worker_id: view for view in made.registry.views}
    assert after[other.name] is before[other.name]
    assert all(after[role.value] is not before[role.value] for role in (P, D))
    made.queue.close()


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 3)), max_size=30))
def test_a_client_is_recent_for_the_given_time(notes: list[tuple[str, float]]) -> None:
    now = 0.0
    recent = RecentClients(5.0, lambda: now)
    last: dict[str, float] = {}
    for client, pause in notes:
        now += pause
        recent.note(client)
        last[client] = now
        assert recent.names == {name for name, noted in last.items() if noted > now - 5.0}


@pytest.mark.parametrize("role", [P, D, B])
async def test_a_worker_that_leaves_gets_nothing_more(role: Role) -> None:
    registry = Registry(ChangeSignal())
    worker = registry.new_worker(
        registration("w", "b", role, 64), cast(Any, "nothing is called"), OrderStream("w", 10.0)
    )
    registry.attach(worker)
    worker.capacity.grant(Credit(max_requests=4, max_tokens=100))
    assert [view.max_requests for view in registry.views] == [4]
    worker.leave()
    assert [view.max_requests for view in registry.views] == [0]
