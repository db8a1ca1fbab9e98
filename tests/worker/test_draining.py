"""The drain of one worker between a real router and a fake engine, by each of its triggers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from msgspec.structs import replace

from contract.addresses import split_address
from contract.errors import UnavailableError
from contract.identity import Role
from contract.membership import DrainOrder
from engine.client import InProcessClient
from engine.connecting import Transfers
from kv_transfer.connector import TransferFactory
from protos import worker_pb2 as pb
from roles.table import STAGES
from router.workers.attached_worker import AttachedWorker
from router.workers.capacity import CreditHold
from tests.engine_scheduling.stepping import fake_settings
from tests.fakes.engine.fakes import start_fake_executor
from tests.worker.test_worker import Running, running, task, until_accepted, waiting_leg, worker_settings
from worker.lifecycle import WorkerState


async def attached(it: Running) -> AttachedWorker:
    await it.router.wait_for_workers(1)
    (worker,) = it.router._path.registry.workers
    return worker


async def until(is_true: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not is_true():
            await asyncio.sleep(0.005)


async def stopped_with_a_bound_leg(it: Running) -> tuple[AttachedWorker, CreditHold, asyncio.Task[None]]:
    """Let a worker stop that is empty, while its router has bound a leg to it."""
    view = await attached(it)
    await until(lambda: view.capacity.credit.max_requests)
    hold = view.capacity.hold("", 10)
    stopping = asyncio.create_task(it.worker.stop(asyncio.Event()))
    await until(lambda: view.capacity.credit.is_empty)
    return view, hold, stopping


async def by_code(it: Running) -> None:
    it.worker.drain.begin(by="a test")


async def by_router(it: Running) -> None:
    (await attached(it)).drain(DrainOrder())


async def by_admin_port(it: Running) -> None:
    status, state = await post(it, "/drain")
    assert (status, state["state"]) == (202, "draining")


async def post(it: Running, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://{await admin_of(it)}{path}", headers=headers) as response,
    ):
        return response.status, await response.json()


async def get(it: Running, path: str) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{await admin_of(it)}{path}") as response,
    ):
        return response.status, await response.json()


async def admin_of(it: Running) -> str:
    return (await attached(it)).registration.admin_address


@pytest.mark.parametrize("trigger", [by_code, by_router, by_admin_port])
async def test_a_draining_worker_gets_nothing_new_and_ends_what_it_has(tmp_path: Path, trigger: Any) -> None:
    """One path for every trigger: no credit, not ready, healthy, and empty when its last leg has ended."""
    async with running(Role.DECODE, tmp_path) as it:
        view = await attached(it)
        await until(lambda: view.capacity.credit.max_requests)
        full = view.capacity.credit
        await it.order(waiting_leg())
        await trigger(it)
        await until(lambda: view.capacity.credit.is_draining)
        credit = view.capacity.credit
        assert (credit.max_requests, credit.max_tokens, credit.is_empty) == (0, 0, False)
        assert 25 < credit.drain_seconds <= 30
        status, body = await get(it, "/ready")
        assert (status, body["reason"]) == (503, "the worker is draining")
        assert (await get(it, "/health"))[0] == 200
        assert it.worker.num_requests == 1
        await it.order(pb.CancelRequest(request_id="r"))
        await until(lambda: view.capacity.credit.is_empty)
        assert it.worker.lifecycle.state is WorkerState.DRAINING
        it.worker.drain.undo(by="a test")
        await until(lambda: replace(view.capacity.credit, number=full.number) == full)
        assert (await get(it, "/ready"))[0] == 200
        await it.order(waiting_leg("other"))
        assert it.worker.num_requests == 1


async def test_the_router_and_the_admin_port_can_undo_a_drain(tmp_path: Path) -> None:
    async with running(Role.DECODE, tmp_path) as it:
        view = await attached(it)
        for undo in (lambda: view.undrain(), None):
            it.worker.drain.begin(by="a test")
            await until(lambda: view.capacity.credit.is_empty)
            if undo:
                undo()
            else:
                assert await post(it, "/undrain") == (200, {**state_of(it), "state": "serving"})
            await until(lambda: view.capacity.credit.max_requests)


def state_of(it: Running) -> dict[str, Any]:
    return {"worker_id": "w", "state": "draining", "is_empty": False, "num_requests": 0}


async def test_a_worker_that_attaches_while_it_drains_gets_nothing(tmp_path: Path) -> None:
    """A router that comes back must not bind legs to it."""
    async with running(Role.DECODE, tmp_path) as it:
        first = await attached(it)
        it.worker.drain.begin(by="a test")
        await until(lambda: first.capacity.credit.is_empty)
        first.gone.set()
        await until(lambda: it.router._path.registry.workers not in ([], [first]))
        second = await attached(it)
        await until(lambda: second.capacity.credit.is_draining)
        assert (second.capacity.credit.max_requests, second.capacity.credit.is_empty) == (0, True)


async def test_a_leg_that_was_sent_before_the_drain_was_known_is_served(tmp_path: Path) -> None:
    """It is accepted, and the worker is empty again only when it has ended."""
    async with running(Role.DECODE, tmp_path) as it:
        view = await attached(it)
        it.worker.drain.begin(by="a test")
        await until(lambda: view.capacity.credit.is_empty)
        await it.order(waiting_leg())
        await until(lambda: not view.capacity.credit.is_empty)
        assert not it.worker.drain.is_empty
        await it.order(pb.CancelRequest(request_id="r"))
        await until(lambda: view.capacity.credit.is_empty)


async def test_the_earliest_deadline_counts(tmp_path: Path) -> None:
    async with running(Role.DECODE, tmp_path) as it:
        drain = it.worker.drain
        drain.begin(8.0, by="a test")
        drain.begin(20.0, by="a test")
        assert 7 < drain.seconds_left <= 8
        drain.begin(3.0, by="a test")
        assert 2 < drain.seconds_left <= 3
        drain.undo(by="a test")
        drain.begin(20.0, by="a test")
        assert 19 < drain.seconds_left <= 20


async def test_a_stopped_worker_leaves_when_its_last_leg_has_ended(tmp_path: Path) -> None:
    """SIGTERM: the goodbye follows the last token, and the drain cannot be undone."""
    async with running(Role.DECODE, tmp_path) as it:
        view = await attached(it)
        await it.order(waiting_leg())
        stopping = asyncio.create_task(it.worker.stop(asyncio.Event()))
        await until(lambda: view.capacity.credit.is_draining)
        with pytest.raises(UnavailableError, match="cannot be undone"):
            it.worker.drain.undo(by="a test")
        assert (await post(it, "/undrain"))[0] == 503
        view.undrain()
        await asyncio.sleep(0.1)
        assert not stopping.done()
        await it.order(pb.CancelRequest(request_id="r"))
        async with asyncio.timeout(10):
            await stopping
        assert view.is_leaving and it.worker.lifecycle.state is WorkerState.LEFT
        with pytest.raises(UnavailableError, match="stopping"):
            it.worker.drain.begin(by="a test")


async def test_a_second_signal_ends_the_drain_at_once(tmp_path: Path) -> None:
    async with running(Role.DECODE, tmp_path) as it:
        view = await attached(it)
        await it.order(waiting_leg())
        at_once = asyncio.Event()
        stopping = asyncio.create_task(it.worker.stop(at_once))
        await until(lambda: view.capacity.credit.is_draining)
        at_once.set()
        async with asyncio.timeout(5):
            await stopping
        assert view.is_leaving
        await until_accepted(it, 0)


async def test_a_dead_engine_ends_the_wait(tmp_path: Path) -> None:
    async with running(Role.DECODE, tmp_path) as it:
        await it.order(waiting_leg())
        stopping = asyncio.create_task(it.worker.stop(asyncio.Event()))
        await until(lambda: it.worker.drain.reason)
        await it.worker.engine.shutdown()
        async with asyncio.timeout(10):
            await stopping


async def test_the_admin_port_waits_for_an_empty_worker(tmp_path: Path) -> None:
    """A hook that runs before the worker is stopped needs one call."""
    async with running(Role.DECODE, tmp_path) as it:
        await it.order(waiting_leg())
        status, state = await post(it, "/drain?wait=0.05&deadline=9")
        assert (status, state["num_requests"], state["is_empty"]) == (202, 1, False)
        assert 8 < it.worker.drain.seconds_left <= 9
        waiting = asyncio.create_task(post(it, "/drain?wait=60"))
        await it.order(pb.CancelRequest(request_id="r"))
        async with asyncio.timeout(10):
            status, state = await waiting
        assert (status, state["num_requests"], state["is_empty"]) == (200, 0, True)


@pytest.mark.parametrize("query", ["wait=soon", "wait=-1", "deadline=nan", "deadline=inf", "wait=1e99"])
async def test_a_time_that_is_none_is_refused_and_drains_nothing(tmp_path: Path, query: str) -> None:
    async with running(Role.DECODE, tmp_path) as it:
        status, body = await post(it, f"/drain?{query}")
        assert status == 400
        assert "give seconds" in body["error"]["message"]
        assert it.worker.drain.reason is None


ADMIN = "admin-key-of-more-than-32-characters"


async def test_a_drain_needs_an_admin_key_if_there_are_any(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every user of the machine can connect to the port."""
    caplog.set_level("INFO")
    async with running(Role.DECODE, tmp_path, changes={"admin_keys": ADMIN}) as it:
        for path in ("/drain", "/undrain", "/undrain?wait=1"):
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                status, body = await post(it, path, headers)
                assert (status, "admin key" in body["error"]["message"]) == (401, True)
        assert it.worker.drain.reason is None
        status, _ = await post(it, "/drain?wait=5", {"Authorization": f"Bearer {ADMIN}"})
        assert (status, it.worker.drain.is_empty) == (200, True)
        status, state = await post(it, "/undrain", {"Authorization": f"Bearer {ADMIN}"})
        assert (status, state["state"]) == (200, "serving")
    assert "draining, ordered by the admin port for 127.0.0.1 with admin key" in caplog.text
    assert "the drain was cancelled by the admin port for 127.0.0.1 with admin key" in caplog.text
    assert ADMIN not in caplog.text


async def test_the_admin_port_of_a_container_refuses_foreign_names(tmp_path: Path) -> None:
    """It is bound to all addresses, and may be published on the loopback address only."""
    changes = {"admin": "0.0.0.0:0", "allowed_hosts": "localhost,workers"}
    async with running(Role.DECODE, tmp_path, changes=changes) as it, aiohttp.ClientSession() as session:
        port = split_address(await admin_of(it))[1]
        for host, status in (("evil.example", 421), ("workers:9101", 200), (f"127.0.0.1:{port}", 200)):
            for path in ("/metrics", "/debug/state"):
                url = f"http://127.0.0.1:{port}{path}"
                async with session.get(url, headers={"Host": host}) as response:
                    assert response.status == status, (host, path)


@pytest.mark.parametrize("begin", [by_code, by_router, by_admin_port])
async def test_a_worker_that_is_forgotten_serves_again(
    tmp_path: Path, begin: Callable[[Running], Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    changes = {"drain_seconds": 0.05, "drain_hold_seconds": 0.05}
    async with running(Role.DECODE, tmp_path, changes=changes) as it:
        view = await attached(it)
        await begin(it)
        await until(lambda: "drain_hold_seconds" in caplog.text)
        await until(lambda: it.worker.lifecycle.state is WorkerState.SERVING)
        await until(lambda: view.capacity.credit.max_requests and not view.capacity.credit.is_draining)


async def test_a_worker_that_is_to_stop_does_not_serve_again(tmp_path: Path) -> None:
    """Its drain was begun by an operator before the signal."""
    changes = {"drain_seconds": 0.05, "drain_hold_seconds": 0.05}
    async with running(Role.DECODE, tmp_path, changes=changes) as it:
        it.worker.drain.begin(by="a test")
        await it.worker.stop(asyncio.Event())
        await asyncio.sleep(0.15)
        assert it.worker.lifecycle.state is not WorkerState.SERVING


@asynccontextmanager
async def lending(folder: Path) -> AsyncIterator[Running]:
    """Run a prefill worker with a real connector, whose leases expire soon."""
    settings = worker_settings(folder, "127.0.0.1:1").model_copy(
        update={"lease_seconds": 0.5, "peer_timeout_seconds": 0.5}
    )
    factory = TransferFactory(settings.transfer(Role.PREFILL, "w", "boot"))

    class LendingClient(InProcessClient):
        """Starts its engine with the connector of above."""

        @classmethod
        async def start(cls, settings: Any, transfers: Any = None, **options: Any) -> Any:
            return await InProcessClient.start(
                fake_settings(), Transfers(factory, STAGES), start=start_fake_executor
            )

    async with running(Role.PREFILL, folder, LendingClient) as it:
        yield it


async def test_a_prefill_worker_is_empty_when_nobody_can_read_its_kv_any_more(tmp_path: Path) -> None:
    """Its leg ends with the first token, long before the decode worker has read the prompt's KV."""
    async with lending(tmp_path) as it:
        view = await attached(it)
        await it.order(pb.PrefillRequest(task=task(), transfer_id="t"))
        await until_accepted(it, 0)
        it.worker.drain.begin(by="a test")
        await until(lambda: view.capacity.credit.is_draining)
        leases = (await it.worker.debug_state())["leases"]
        assert leases and not it.worker.drain.is_empty
        await until(lambda: view.capacity.credit.is_empty)
        assert (await it.worker.debug_state())["leases"] == []


async def test_a_stopped_worker_waits_for_a_leg_that_is_on_its_way(tmp_path: Path) -> None:
    """The router has bound it before it received the credit: it must not fail with the worker."""
    async with running(Role.DECODE, tmp_path) as it:
        view, hold, stopping = await stopped_with_a_bound_leg(it)
        await asyncio.sleep(0.3)
        assert not stopping.done()
        await it.order(waiting_leg())
        await until(lambda: not view.capacity.credit.is_empty)
        hold.release()
        await it.order(pb.CancelRequest(request_id="r"))
        async with asyncio.timeout(10):
            await stopping
        assert view.is_leaving


async def test_a_leg_that_never_arrives_keeps_a_stopped_worker_only_while_it_is_bound(tmp_path: Path) -> None:
    """Its call has failed: the router sends no message about that, and is asked again."""
    async with running(Role.DECODE, tmp_path) as it:
        view, hold, stopping = await stopped_with_a_bound_leg(it)
        hold.release()
        async with asyncio.timeout(10):
            await stopping
        assert view.is_leaving
