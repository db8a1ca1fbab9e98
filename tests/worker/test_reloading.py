"""B16: the reload of one worker's weights, between two real routers and a fake engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from contract.errors import (
    IncompatiblePeerError,
    KvbatonError,
    SettingError,
    UnavailableError,
    WorkerLostError,
)
from engine.settings import EngineSettings
from protos import worker_pb2 as pb
from router.workers.attached_worker import AttachedWorker
from tests.fakes.engine.fakes import FakeExecutor, start_fake_executor
from tests.worker.ordering import give_order
from tests.worker.test_several_routers import Served, served, until

OLD, NEW = "fake:fake", "fake:fake+"


@asynccontextmanager
async def reloadable(folder: Path) -> AsyncIterator[tuple[Served, FakeExecutor, list[AttachedWorker]]]:
    """Run a worker; yield it, its executor, and how each of its two routers sees it."""
    executors: list[FakeExecutor] = []

    def start(settings: EngineSettings) -> tuple[FakeExecutor, int]:
        executor, num_blocks = start_fake_executor(settings)
        executors.append(executor)
        return executor, num_blocks

    async with served(folder, start=start) as it:
        views = [await it.attached(index) for index in range(2)]
        await offers_credit(views)
        yield it, executors[0], views


async def offers_credit(views: list[AttachedWorker]) -> None:
    await until(lambda: all(view.capacity.credit.max_requests for view in views))


def weights(views: list[AttachedWorker]) -> list[tuple[str, int]]:
    return [(view.registration.model_fingerprint, view.registration.weights_epoch) for view in views]


async def test_every_router_learns_the_new_weights_before_it_gets_credit(tmp_path: Path) -> None:
    """A leg of one router holds up a reload that the other one orders. Requests wait meanwhile, and no role is missing."""
    async with reloadable(tmp_path) as (it, _, views):
        await it.leg("r", 1)
        async with views[0].calls.reloading() as call:
            closing = asyncio.create_task(call.close())
            await until(lambda: all(view.capacity.waits_for_credit for view in views))
            assert all(view.has_credit for view in views) and not closing.done()
            async with views[1].calls.reloading() as second:
                with pytest.raises(IncompatiblePeerError, match="being reloaded already"):
                    await second.close()
            await give_order(views[1], pb.CancelRequest(request_id="r"))
            await closing
            assert await call.load(7) == NEW
            assert weights(views) == [(OLD, 0)] * 2
            await call.serve(8)
        await offers_credit(views)
        assert weights(views) == [(NEW, 8)] * 2
        served_by = [router._path.registry.weights for router in it.routers]
        assert [(each.fingerprint, each.epoch) for each in served_by] == [(NEW, 8)] * 2
        views[1].gone.set()
        await until(lambda: it.routers[1]._path.registry.workers not in ([], [views[1]]))
        assert weights([await it.attached(1)]) == [(NEW, 8)]


async def test_a_router_that_is_lost_leaves_the_worker_as_it_was(tmp_path: Path) -> None:
    """Before the order to load, with the weights that it has."""
    async with reloadable(tmp_path) as (_, _, views):
        for _ in range(2):
            async with views[0].calls.reloading() as call:
                await call.close()
            await offers_credit(views)
        assert weights(views) == [(OLD, 0)] * 2


async def test_a_router_that_is_lost_during_the_load_leaves_the_new_weights(tmp_path: Path) -> None:
    """No credit is offered before the load is over."""
    async with reloadable(tmp_path) as (it, executor, views):
        executor.may_reload.clear()
        async with views[0].calls.reloading() as call:
            await call.close()
            loading = asyncio.create_task(call.load(7))
            await until(lambda: it.worker.reload.is_loading)
        assert not any(view.capacity.credit.max_requests for view in views)
        with pytest.raises(KvbatonError):
            await loading
        executor.may_reload.set()
        await offers_credit(views)
        assert weights(views) == [(NEW, 7)] * 2


async def test_weights_that_are_not_served_keep_their_former_number(tmp_path: Path) -> None:
    """Every router refuses the worker then, and its process ends with the reason."""
    async with reloadable(tmp_path) as (it, _, views):
        async with views[0].calls.reloading() as call:
            await call.close()
            await call.load(7)
            await call.serve(0)
        with pytest.raises(IncompatiblePeerError, match=f"fingerprint fake:fake.*, this router serves {OLD}"):
            await asyncio.wait_for(it.run, 20)


async def test_another_model_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    async with reloadable(tmp_path) as (_, executor, views):
        executor.reload_errors["check_reload"] = SettingError("another model")
        async with views[0].calls.reloading() as call:
            with pytest.raises(IncompatiblePeerError, match="another model"):
                await call.close()
        await offers_credit(views)
        assert weights(views) == [(OLD, 0)] * 2


async def test_a_worker_that_keeps_its_weights_gets_no_leg_before_the_end(tmp_path: Path) -> None:
    """A leg would be computed with the former weights while other workers load."""
    async with reloadable(tmp_path) as (it, executor, views):
        async with views[0].calls.reloading() as call:
            await call.close()
            executor.reload_errors["check_reload"] = SettingError("another model")
            with pytest.raises(IncompatiblePeerError, match="keeps its former weights: another model"):
                await call.load(7)
            assert it.worker.lifecycle.is_reloading
        await offers_credit(views)
        assert weights(views) == [(OLD, 0)] * 2


async def test_a_worker_that_has_lost_its_weights_ends(tmp_path: Path) -> None:
    async with reloadable(tmp_path) as (it, executor, views):
        executor.reload_errors["reload_weights"] = KvbatonError("a shard is damaged")
        async with views[0].calls.reloading() as call:
            await call.close()
            with pytest.raises(WorkerLostError, match=r"worker w ends: .*: a shard is damaged"):
                await call.load(7)
            assert not it.run.done()
        with pytest.raises(UnavailableError, match="could not be reloaded, and the former ones are gone"):
            await asyncio.wait_for(it.run, 20)


async def test_a_draining_worker_is_not_reloaded(tmp_path: Path) -> None:
    async with reloadable(tmp_path) as (it, _, views):
        it.worker.drain.begin(by="a test")
        async with views[0].calls.reloading() as call:
            with pytest.raises(IncompatiblePeerError, match="it drains"):
                await call.close()
        it.worker.drain.undo(by="a test")
        await offers_credit(views)
