"""A worker takes another role when it holds nothing, and its routers bind legs by the new role."""

import asyncio
from pathlib import Path

import pytest

from contract.errors import InvalidRequestError, UnavailableError
from contract.identity import Role
from contract.membership import RoleOrder
from protos import worker_pb2 as pb
from tests.worker.test_draining import attached, until
from tests.worker.test_worker import running, task, until_accepted, waiting_leg
from worker.lifecycle import WorkerState


@pytest.mark.parametrize("new", [Role.PREFILL, Role.AGGREGATED])
async def test_an_idle_worker_takes_the_role_at_once(tmp_path: Path, new: Role) -> None:
    """Its router has the new role before it may bind a leg, and counts what clients hold of it by this role."""
    async with running(Role.DECODE, tmp_path) as it:
        view = await attached(it)
        await until(lambda: view.capacity.credit.max_requests)
        view.flip(RoleOrder(role=new.value, epoch=1))
        await until(lambda: view.role is new and view.capacity.credit.max_requests)
        assert (view.capacity.held is None) is (new is Role.PREFILL)
        assert it.worker.lifecycle.state is WorkerState.SERVING
        assert view.view().role is new
        await it.call("Embed", pb.EmbedLegRequest(task=task()))
        await until_accepted(it, 0)


async def test_a_worker_with_a_leg_takes_the_role_when_the_leg_has_ended(tmp_path: Path) -> None:
    """Law 4: it lends and fetches in one role only."""
    async with running(Role.DECODE, tmp_path) as it:
        view = await attached(it)
        await it.call("Decode", waiting_leg())
        view.flip(RoleOrder(role="prefill", epoch=1))
        await until(lambda: view.capacity.credit.is_draining)
        await asyncio.sleep(0.1)
        assert (it.worker.lifecycle.role, view.role) == (Role.DECODE, Role.DECODE)
        await it.call("Cancel", pb.CancelRequest(request_id="r"))
        await until(lambda: view.role is Role.PREFILL and view.capacity.credit.max_requests)
        assert it.worker.drain.reason is None


async def test_a_leg_on_its_way_is_served_in_the_role_for_which_it_was_bound(tmp_path: Path) -> None:
    """The router has bound it before it received the credit of the drain."""
    async with running(Role.DECODE, tmp_path) as it:
        view = await attached(it)
        await until(lambda: view.capacity.credit.max_requests)
        hold = view.capacity.hold("", 10)
        view.flip(RoleOrder(role="prefill", epoch=1))
        await until(lambda: view.capacity.credit.is_empty)
        await it.call("Decode", waiting_leg())
        assert view.role is Role.DECODE
        await it.call("Cancel", pb.CancelRequest(request_id="r"))
        hold.release()
        await until(lambda: view.role is Role.PREFILL)


async def test_an_older_order_changes_nothing(tmp_path: Path) -> None:
    """Two routers may send orders; the newest one counts, wherever it arrives first."""
    async with running(Role.DECODE, tmp_path) as it:
        view = await attached(it)
        view.flip(RoleOrder(role="prefill", epoch=5))
        await until(lambda: view.role is Role.PREFILL)
        for epoch in (4, 5):
            view.flip(RoleOrder(role="both", epoch=epoch))
        view.flip(RoleOrder(role="prefill", epoch=6))
        await until(lambda: it.worker.lifecycle.role_epoch == 6)
        assert it.worker.lifecycle.role is Role.PREFILL


async def test_an_undone_drain_ends_the_change(tmp_path: Path) -> None:
    async with running(Role.DECODE, tmp_path) as it:
        view = await attached(it)
        await it.call("Decode", waiting_leg())
        view.flip(RoleOrder(role="prefill", epoch=1))
        await until(lambda: view.capacity.credit.is_draining)
        view.undrain()
        await until(lambda: not view.capacity.credit.is_draining)
        await it.call("Cancel", pb.CancelRequest(request_id="r"))
        await until_accepted(it, 0)
        await asyncio.sleep(0.1)
        assert (it.worker.lifecycle.role, view.role) == (Role.DECODE, Role.DECODE)


async def test_a_stopped_worker_takes_no_other_role(tmp_path: Path) -> None:
    async with running(Role.DECODE, tmp_path) as it:
        view = await attached(it)
        await it.call("Decode", waiting_leg())
        view.flip(RoleOrder(role="prefill", epoch=1))
        await until(lambda: view.capacity.credit.is_draining)
        stopping = asyncio.create_task(it.worker.stop(asyncio.Event()))
        await asyncio.sleep(0)
        await it.call("Cancel", pb.CancelRequest(request_id="r"))
        async with asyncio.timeout(10):
            await stopping
        assert (it.worker.lifecycle.role, it.worker.lifecycle.state) == (Role.DECODE, WorkerState.LEFT)


async def test_a_router_that_attaches_later_learns_the_role_before_the_credit(tmp_path: Path) -> None:
    """The registration has the role in which the worker started."""
    async with running(Role.DECODE, tmp_path) as it:
        first = await attached(it)
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
