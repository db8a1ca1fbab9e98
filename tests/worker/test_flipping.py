"""A worker takes another role while it serves, and its routers bind legs by the new role at once."""

import asyncio
from pathlib import Path

import pytest

from contract.errors import InternalError, InvalidRequestError, UnavailableError
from contract.identity import Role
from contract.membership import RoleOrder
from protos import worker_pb2 as pb
from router.workers.attached_worker import AttachedWorker
from tests.worker.test_draining import attached, until
from tests.worker.test_worker import Running, running, task, until_accepted, waiting_leg
from worker.lifecycle import WorkerState

UNDISTURBED_SECONDS = 0.3


class Silenced:
    """Lets a router answer no credit until ``release``."""

    def __init__(self, view: AttachedWorker) -> None:
        self._kept: list[pb.RouterMessage] = []
        self._orders = view.orders
        self._send = view.orders.send
        self._orders.send = self._keep  # type: ignore[method-assign]

    def _keep(self, message: pb.RouterMessage) -> None:
        if message.HasField("credit_use"):
            self._kept.append(message)
        else:
            self._send(message)

    def release(self) -> None:
        """Send what was kept, and keep nothing more."""
        self._orders.send = self._send  # type: ignore[method-assign]
        for message in self._kept:
            self._send(message)


async def attached_alone(it: Running) -> AttachedWorker:
    """Return the worker as its router has it, which does not need the role although no other worker has it."""
    it.router._path.registry.needs_role_of = lambda worker: False  # type: ignore[method-assign]
    return await attached(it)


async def attached_with_credit(it: Running) -> AttachedWorker:
    """Return the worker as its router has it, once it may bind legs to it. The router needs no role of it."""
    view = await attached_alone(it)
    await until(lambda: view.capacity.credit.max_requests)
    return view


async def closing(it: Running) -> tuple[AttachedWorker, Silenced]:
    """Order the worker to become a prefill worker, and let its router not answer that it binds nothing more."""
    view = await attached_with_credit(it)
    answers = Silenced(view)
    view.flip(RoleOrder(role="prefill", epoch=1))
    await until(lambda: view.capacity.credit.max_requests == 0)
    return view, answers


@pytest.mark.parametrize("new", [Role.PREFILL, Role.AGGREGATED])
async def test_an_idle_worker_takes_the_role_at_once(tmp_path: Path, new: Role) -> None:
    """Its router has the new role before it may bind a leg, and counts what clients hold of it by this role."""
    async with running(Role.DECODE, tmp_path) as it:
        view = await attached_with_credit(it)
        view.flip(RoleOrder(role=new.value, epoch=1))
        await until(lambda: view.role is new and view.capacity.credit.max_requests)
        assert (view.capacity.held is None) is (new is Role.PREFILL)
        assert it.worker.lifecycle.state is WorkerState.SERVING
        assert view.view().role is new
        await it.order(pb.EmbedLegRequest(task=task()))
        await until_accepted(it, 0)


async def test_a_worker_with_a_leg_takes_the_role_at_once_and_serves_both(tmp_path: Path) -> None:
    """The leg goes on; until it has ended the worker is unsettled, and a leg that is on its way to it is served."""
    async with running(Role.DECODE, tmp_path) as it:
        view = await attached_with_credit(it)
        hold = view.capacity.hold("", 10)
        await it.order(waiting_leg())
        view.flip(RoleOrder(role="prefill", epoch=1))
        await until(lambda: view.role is Role.PREFILL and view.capacity.credit.max_requests)
        assert view.capacity.credit.is_unsettled and it.worker.drain.reason is None
        assert (view.capacity.num_requests, view.capacity.former.num_legs) == (0, 1)
        await it.order(pb.EmbedLegRequest(task=task("new")))
        await it.order(waiting_leg("late"))
        for request_id in ("r", "late"):
            await it.order(pb.CancelRequest(request_id=request_id))
        await until_accepted(it, 0)
        number = view.capacity.credit.number
        await asyncio.sleep(UNDISTURBED_SECONDS)
        assert view.capacity.credit.is_unsettled and view.capacity.credit.number == number
        hold.release()
        await until(lambda: not view.capacity.credit.is_unsettled)
        assert view.capacity.credit.number == number + 1, "the router has reported that on its own"
        with pytest.raises(InternalError, match="prefill worker does not serve Decode"):
            await it.order(waiting_leg("r"))


async def test_a_role_is_taken_when_every_router_has_answered(tmp_path: Path) -> None:
    """Law 4: otherwise one router binds legs by the new role while another one binds them by the former one."""
    async with running(Role.DECODE, tmp_path) as it:
        view, answers = await closing(it)
        assert view.has_credit
        await asyncio.sleep(0.1)
        assert (it.worker.lifecycle.role, view.role) == (Role.DECODE, Role.DECODE)
        answers.release()
        await until(lambda: view.role is Role.PREFILL and view.capacity.credit.max_requests)


async def test_a_worker_keeps_its_role_if_a_router_needs_it(tmp_path: Path) -> None:
    """It offers its credit again, and reports that the order is over; the next one may be carried out."""
    async with running(Role.DECODE, tmp_path) as it:
        view = await attached_with_credit(it)
        registry = it.router._path.registry
        is_not_needed = registry.needs_role_of
        registry.needs_role_of = lambda worker: type(registry).needs_role_of(registry, worker)  # type: ignore[method-assign]
        view.flip(RoleOrder(role="prefill", epoch=1))
        await until(lambda: not view.capacity.ordered)
        await until(lambda: view.capacity.credit.max_requests)
        assert (it.worker.lifecycle.role, view.role) == (Role.DECODE, Role.DECODE)
        assert not view.capacity.credit.is_unsettled and not view.capacity.needs_role
        registry.needs_role_of = is_not_needed  # type: ignore[method-assign]
        view.flip(RoleOrder(role="prefill", epoch=2))
        await until(lambda: view.role is Role.PREFILL and view.capacity.credit.max_requests)


async def test_a_later_order_for_another_role_is_announced_before_it_is_carried_out(tmp_path: Path) -> None:
    """The routers have answered for the role of the first order only."""
    async with running(Role.DECODE, tmp_path) as it:
        view = await attached_with_credit(it)
        answers = Silenced(view)
        view.flip(RoleOrder(role="prefill", epoch=1))
        await until(lambda: view.capacity.credit.next_role == "prefill")
        view.flip(RoleOrder(role="both", epoch=2))
        answers.release()
        await until(lambda: view.role is Role.AGGREGATED and view.capacity.credit.max_requests)
        assert view.registration.role == "both" and it.worker.lifecycle.role_epoch == 2


async def test_a_worker_is_settled_only_without_kv_of_its_former_role(tmp_path: Path) -> None:
    """The router has cancelled the leg, and the cancel is still on its way."""
    async with running(Role.DECODE, tmp_path) as it:
        view = await attached_alone(it)
        await it.order(waiting_leg())
        await until(lambda: it.worker.engine.stats.num_fetches)
        view.flip(RoleOrder(role="prefill", epoch=1))
        await until(lambda: view.role is Role.PREFILL and view.capacity.credit.max_requests)
        await asyncio.sleep(UNDISTURBED_SECONDS)
        assert it.worker.lifecycle.is_unsettled
        await it.order(pb.CancelRequest(request_id="r"))
        await until(lambda: not view.capacity.credit.is_unsettled)


async def test_a_further_role_waits_until_the_worker_is_settled(tmp_path: Path) -> None:
    async with running(Role.DECODE, tmp_path) as it:
        view = await attached_with_credit(it)
        hold = view.capacity.hold("", 10)
        view.flip(RoleOrder(role="prefill", epoch=1))
        await until(lambda: view.role is Role.PREFILL)
        view.flip(RoleOrder(role="both", epoch=2))
        view.flip(RoleOrder(role="decode", epoch=3))
        await asyncio.sleep(UNDISTURBED_SECONDS)
        assert view.role is Role.PREFILL
        hold.release()
        await until(lambda: view.role is Role.DECODE)
        assert it.worker.lifecycle.role_epoch == 3


async def test_a_leg_of_the_former_role_does_not_use_the_new_credit(tmp_path: Path) -> None:
    """A hold that was made before counts apart, also when it is released."""
    async with running(Role.DECODE, tmp_path) as it:
        view = await attached_with_credit(it)
        former = view.capacity.hold("client", 10)
        view.flip(RoleOrder(role="both", epoch=1))
        await until(lambda: view.role is Role.AGGREGATED and view.capacity.credit.max_requests)
        new = view.capacity.hold("client", 5)
        assert (view.capacity.num_requests, view.capacity.num_tokens) == (1, 5)
        former.release()
        assert (view.capacity.num_requests, view.capacity.num_tokens, view.capacity.former.num_legs) == (
            1,
            5,
            0,
        )
        new.release()
        assert (view.capacity.num_requests, view.capacity.num_tokens) == (0, 0)


async def test_an_older_order_changes_nothing(tmp_path: Path) -> None:
    """Two routers may send orders; the newest one counts, wherever it arrives first."""
    async with running(Role.DECODE, tmp_path) as it:
        view = await attached_alone(it)
        view.flip(RoleOrder(role="prefill", epoch=5))
        await until(lambda: view.role is Role.PREFILL)
        for epoch in (4, 5):
            view.flip(RoleOrder(role="both", epoch=epoch))
        view.flip(RoleOrder(role="prefill", epoch=6))
        await until(lambda: it.worker.lifecycle.role_epoch == 6)
        assert it.worker.lifecycle.role is Role.PREFILL


async def test_a_drain_ends_a_change_that_was_not_made(tmp_path: Path) -> None:
    """Neither at once nor when the drain is undone; and a draining worker takes no order."""
    async with running(Role.DECODE, tmp_path) as it:
        view, answers = await closing(it)
        it.worker.drain.begin(by="a test")
        view.flip(RoleOrder(role="prefill", epoch=2))
        await until(lambda: view.capacity.credit.is_draining)
        answers.release()
        await until(lambda: view.capacity.credit.is_unsettled)
        it.worker.drain.undo(by="a test")
        await until(lambda: view.capacity.credit.max_requests and not view.capacity.credit.is_unsettled)
        assert (it.worker.lifecycle.role, view.role) == (Role.DECODE, Role.DECODE)
        view.flip(RoleOrder(role="prefill", epoch=3))
        await until(lambda: view.role is Role.PREFILL)


async def test_a_worker_whose_change_was_ended_by_a_drain_offers_its_credit_again(tmp_path: Path) -> None:
    """The drain is undone before a router has answered that nothing is bound any more."""
    async with running(Role.DECODE, tmp_path) as it:
        view, answers = await closing(it)
        it.worker.drain.begin(by="a test")
        it.worker.drain.undo(by="a test")
        await until(lambda: view.capacity.credit.number >= 4)
        answers.release()
        await until(lambda: view.capacity.credit.max_requests and not view.capacity.credit.is_draining)
        assert (it.worker.lifecycle.role, view.role) == (Role.DECODE, Role.DECODE)


async def test_answers_leave_a_draining_worker_when_every_router_has_answered(tmp_path: Path) -> None:
    """Law 4: it lends from then on, and no router may believe that it only fetches."""
    async with running(Role.DECODE, tmp_path) as it:
        view = await attached_with_credit(it)
        answers = Silenced(view)
        it.worker.drain.begin(by="a test")
        await until(lambda: view.capacity.credit.is_draining)
        await asyncio.sleep(0.05)
        assert not view.capacity.credit.is_unsettled
        answers.release()
        await until(lambda: view.capacity.credit.is_unsettled)


async def test_a_drain_that_is_undone_at_once_leaves_the_worker_settled(tmp_path: Path) -> None:
    async with running(Role.DECODE, tmp_path) as it:
        view = await attached_with_credit(it)
        it.worker.drain.begin(by="a test")
        it.worker.drain.undo(by="a test")
        await until(lambda: view.capacity.credit.number >= 3)
        await asyncio.sleep(0.05)
        assert not it.worker.lifecycle.is_unsettled and not view.capacity.credit.is_unsettled


async def test_a_stopped_worker_takes_no_other_role(tmp_path: Path) -> None:
    async with running(Role.DECODE, tmp_path) as it:
        view, answers = await closing(it)
        stopping = asyncio.create_task(it.worker.stop(asyncio.Event()))
        await until(lambda: view.capacity.credit.is_draining)
        answers.release()
        async with asyncio.timeout(10):
            await stopping
        assert (it.worker.lifecycle.role, it.worker.lifecycle.state) == (Role.DECODE, WorkerState.LEFT)


async def test_a_router_that_attaches_later_learns_the_role_before_the_credit(tmp_path: Path) -> None:
    """The registration has the role in which the worker started."""
    async with running(Role.DECODE, tmp_path) as it:
        first = await attached_alone(it)
        first.flip(RoleOrder(role="prefill", epoch=1))
        await until(lambda: first.role is Role.PREFILL)
        first.gone.set()
        await until(lambda: it.router._path.registry.workers not in ([], [first]))
        second = await attached(it)
        await until(lambda: second.capacity.credit.max_requests)
        assert second.role is Role.PREFILL


async def test_a_role_that_no_worker_has_is_refused(tmp_path: Path) -> None:
    async with running(Role.DECODE, tmp_path) as it:
        flip = it.worker.flip
        with pytest.raises(InvalidRequestError, match="role is 'router'"):
            flip.begin(RoleOrder(role="router", epoch=1))
        it.worker.lifecycle.leave()
        with pytest.raises(UnavailableError, match="stopping"):
            flip.begin(RoleOrder(role="prefill", epoch=1))
