"""A worker with several routers: each has its own stream, its own requests, and a share of the credit."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from contract.errors import IncompatiblePeerError
from contract.identity import Role
from contract.outputs import EngineOutput, FinishReason
from engine.client import InProcessClient
from engine.connecting import Transfers
from engine.startup import ExecutorStart
from protos import WORKER_PROTOCOL_MAX, WORKER_PROTOCOL_MIN
from protos import worker_pb2 as pb
from roles.table import ROLES, STAGES
from router.service import RouterService
from router.settings import RouterSettings
from router.workers.attached_worker import AttachedWorker
from serving.cluster_tls import worker_tls
from tests.engine_scheduling.stepping import fake_settings
from tests.fakes.engine.fakes import start_fake_executor
from tests.fakes.engine.transfer import fake_connector_factory
from tests.fakes.router.worker import kv_layout
from tests.worker.ordering import give_order
from tests.worker.test_worker import FREE, SECRET, task, waiting_leg, worker_settings
from worker.registration import WorkerIdentity
from worker.router_addresses import RouterAddresses
from worker.router_links import RouterLinks
from worker.router_stream import RouterAddress, RouterStream
from worker.service import open_ports
from worker.worker import Worker


@dataclass
class Served:
    """A worker, its routers in order, and the task that runs it."""

    worker: Worker
    routers: list[RouterService]
    run: asyncio.Task[None]

    async def attached(self, index: int) -> AttachedWorker:
        """Return the worker as one of its routers has it, once it is attached there."""
        return await attached_to(self.routers[index])

    async def leg(self, request_id: str, index: int) -> None:
        """Start a leg of one router that waits for KV which is never sent."""
        leg = waiting_leg(request_id)
        leg.source.transfer_id = request_id
        await give_order(await self.attached(index), leg)


async def attached_to(router: RouterService) -> AttachedWorker:
    async with asyncio.timeout(20):
        await router.wait_for_workers(1)
    (worker,) = router._path.registry.workers
    return worker


async def started(stack: AsyncExitStack, **settings: Any) -> RouterService:
    router = RouterService(RouterSettings(**{**FREE, "secret": SECRET, **settings}))
    await router.start()
    stack.push_async_callback(router.stop)
    return router


@asynccontextmanager
async def served(
    folder: Path, num_routers: int = 2, *, names: str = "", start: ExecutorStart = start_fake_executor
) -> AsyncIterator[Served]:
    """Run a decode worker with routers. names: of further routers. start: starts its executor."""
    async with AsyncExitStack() as stack:
        routers = [await started(stack) for _ in range(num_routers)]
        addresses = [router.addresses.internal for router in routers]
        settings = worker_settings(folder, ",".join([*addresses, *filter(None, [names])]))
        engine = await InProcessClient.start(
            fake_settings(), Transfers(fake_connector_factory, STAGES), start=start
        )
        stack.push_async_callback(engine.shutdown)
        worker = Worker(WorkerIdentity(Role.DECODE, "w", "boot"), ROLES, settings, engine)
        bound = await stack.enter_async_context(open_ports(worker, settings))
        run = asyncio.create_task(worker.run(bound["grpc"], bound["admin"]))
        stack.push_async_callback(asyncio.wait, [run])
        stack.callback(run.cancel)
        async with asyncio.timeout(20):
            await worker.wait_ready()
        yield Served(worker, routers, run)


async def until(is_true: Any) -> None:
    async with asyncio.timeout(20):
        while not is_true():
            await asyncio.sleep(0.005)


async def test_a_ready_worker_is_attached_to_all_routers_with_one_boot_id(tmp_path: Path) -> None:
    async with served(tmp_path, 3) as it:
        workers = [await it.attached(index) for index in range(3)]
        assert {worker.registration.boot_id for worker in workers} == {"boot"}
        assert len({worker.session for worker in workers}) == 3


async def test_a_lost_router_ends_its_own_requests_only(tmp_path: Path) -> None:
    """Law 5: the requests of the other router go on, and the worker serves it as before."""
    async with served(tmp_path) as it:
        for number in range(3):
            await it.leg(f"a{number}", 0)
            await it.leg(f"b{number}", 1)
        await it.routers[0].stop()
        await until(lambda: it.worker.num_requests == 3)
        assert sorted(request.request_id for request in it.worker._accepted) == ["b0", "b1", "b2"]
        assert it.worker.is_ready
        await it.leg("b3", 1)
        assert it.worker.num_requests == 4
        await it.worker.engine.call("check_integrity")


async def test_tokens_are_sent_to_the_router_of_their_request(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        heard: list[list[Any]] = [[], []]
        for index in range(2):
            worker = await it.attached(index)
            for name in ("a", "b"):
                worker.routes.bind((name, 0, 0), heard[index].append)
        for index, name in enumerate("ab"):
            await give_order(await it.attached(index), pb.DecodeRequest(task=task(name)))
        await until(lambda: it.worker.num_requests == 0)
        await until(lambda: all(entries and entries[-1].finish_reason for entries in heard))
        for name, entries in zip("ab", heard, strict=True):
            assert {entry.request_id for entry in entries} == {name}
            assert sum(len(entry.token_ids) for entry in entries) == 4


async def test_the_first_tokens_come_with_the_time_that_the_worker_held_the_request(tmp_path: Path) -> None:
    """It holds the wait in the engine and the prompt's computation, and what is left is the worker's own handling."""
    async with served(tmp_path, 1) as it:
        worker = await it.attached(0)
        heard = list[Any]()
        worker.routes.bind(("a", 0, 0), heard.append)
        await give_order(worker, pb.DecodeRequest(task=task("a")))
        await until(lambda: heard and heard[-1].finish_reason)
        first, *others = list(heard)
    assert first.timings.held_seconds > first.timings.queue_seconds + first.timings.prefill_seconds > 0
    assert not any(entry.HasField("timings") for entry in others)


async def test_routers_divide_the_credit_and_a_survivor_gets_all_of_it(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        capacities = [(await it.attached(index)).capacity for index in range(2)]
        total = it.worker._settings.max_num_seqs
        halves = [total // 2, total - total // 2]
        await until(lambda: sorted(one.credit.max_requests for one in capacities) == halves)
        await it.routers[0].stop()
        await until(lambda: capacities[1].credit.max_requests == total)
        assert it.worker._sessions._shares.num_overdrawn == 0


async def test_a_router_that_holds_legs_keeps_credit_for_them(tmp_path: Path) -> None:
    """A second router comes while the first one holds the whole credit: it gets what is returned, and not more."""
    async with AsyncExitStack() as stack:
        late = await started(stack)
        internal = late.addresses.internal
        await late.stop()
        it = await stack.enter_async_context(served(tmp_path, 1, names=internal))
        first = await it.attached(0)
        total = it.worker._settings.max_num_seqs
        await until(lambda: first.capacity.credit.max_requests == total)
        holds = [first.capacity.hold("", 1) for _ in range(total)]
        late = await started(stack, internal=internal)
        second = await attached_to(late)
        await until(lambda: second.capacity.waits_for_credit)
        assert second.has_credit
        assert second.capacity.credit.max_requests == 0
        for hold in holds:
            hold.release()
        await until(lambda: second.capacity.credit.max_requests > 0)
        await until(lambda: first.capacity.credit.max_requests + second.capacity.credit.max_requests == total)


async def test_a_router_at_two_addresses_has_one_stream(tmp_path: Path) -> None:
    """A stream over the second address replaces the first one, which must not come back in turn, again and again."""
    async with AsyncExitStack() as stack:
        router = await started(stack, internal="0.0.0.0:0")
        port = router.addresses.internal.rpartition(":")[2]
        names = f"127.0.0.1:{port},127.0.0.2:{port}"
        it = await stack.enter_async_context(served(tmp_path, 0, names=names))
        await until(lambda: sum(bool(link.stream.router_id) for link in _links(it)) == 2)
        await until(lambda: sum(link.stream.is_attached for link in _links(it)) == 1)
        (attached,) = [link.stream for link in _links(it) if link.stream.is_attached]
        session = attached.session
        await asyncio.sleep(0.5)  # the time in which the other link would attach again
        assert (await attached_to(router)).session == session
        (await attached_to(router)).gone.set()
        await until(lambda: not attached.is_attached)
        await until(lambda: any(link.stream.is_attached for link in _links(it)))


def _links(it: Served) -> list[Any]:
    assert it.worker._links is not None
    return list(it.worker._links._links.values())


async def test_a_refusal_by_one_router_leaves_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that no router accepts ends with the reason; one that serves another router logs it."""
    monkeypatch.setattr("worker.router_links._OTHERS_SECONDS", 0.2)
    monkeypatch.setattr("worker.router_links.LAST_RETRY_SECONDS", 0.1)
    async with AsyncExitStack() as stack:
        foreign = await started(stack, secret="another secret, which also has 32 characters")
        it = await stack.enter_async_context(served(tmp_path, 1, names=foreign.addresses.internal))
        await until(lambda: "the worker serves its other routers" in caplog.text)
        assert it.worker.is_ready
        await it.routers[0].stop()
        await asyncio.wait([it.run], timeout=20)
        assert isinstance(it.run.exception(), IncompatiblePeerError)


REGISTRATION = pb.Registration(
    protocol_min=WORKER_PROTOCOL_MIN,
    protocol_max=WORKER_PROTOCOL_MAX,
    worker_id="w",
    boot_id="b",
    role="decode",
    address="127.0.0.1:1",
    control_address="127.0.0.1:1",
    model_fingerprint="model",
    max_model_len=16,
    kv_layout=kv_layout(),
)


async def test_a_name_is_resolved_again_and_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A router that is started later is found; a link to an address that is gone ends when it is lost, and not before."""
    monkeypatch.setattr("worker.router_links.RESOLVE_SECONDS", 0.02)
    found: dict[str, frozenset[str]] = {}

    async def look_up(host: str, port: int) -> frozenset[str]:
        if host not in found:
            raise OSError(f"{host} is not known")
        return found[host]

    async with AsyncExitStack() as stack:
        first, second = await started(stack), await started(stack)
        listener = Listener()
        links = RouterLinks(
            RouterAddresses(["routers:1"], look_up),
            lambda address: RouterAddress(address, worker_tls(SECRET, "w", "b"), 3.0),
            REGISTRATION,
            listener,
        )
        running = asyncio.create_task(links.run())
        stack.push_async_callback(asyncio.wait, [running])
        stack.callback(running.cancel)
        await asyncio.sleep(0.1)
        assert links.attached == []
        found["routers"] = frozenset({first.addresses.internal})
        await until(lambda: first.addresses.internal in links._links)
        found["routers"] = frozenset({first.addresses.internal, second.addresses.internal})
        await until(lambda: second.addresses.internal in links._links)
        found["routers"] = frozenset({second.addresses.internal})
        await until(lambda: first.addresses.internal not in links._links)
        del found["routers"]
        await asyncio.sleep(0.1)
        assert second.addresses.internal in links._links


class Listener:
    """Ignores what happens on streams."""

    def on_open(self, stream: RouterStream) -> None:
        """Ignore."""

    async def on_message(self, stream: RouterStream, message: pb.RouterMessage) -> None:
        """Ignore."""

    async def on_loss(self, session: str) -> None:
        """Ignore."""


async def test_outputs_of_unknown_requests_are_dropped(tmp_path: Path) -> None:
    async with served(tmp_path) as it:
        output = EngineOutput(request_id="unknown", finish_reason=FinishReason.ABORT)
        it.worker._sessions.send_step([output], it.worker.engine.stats)
        workers = [await it.attached(index) for index in range(2)]
        await it.leg("a", 0)
        assert [worker.routes.num_stale_entries for worker in workers] == [0, 0]
