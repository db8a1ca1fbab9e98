"""A worker between a real router and a fake engine."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from contract.errors import (
    ErrorKind,
    IncompatiblePeerError,
    InvalidRequestError,
    KvbatonError,
    SettingError,
    WorkerLostError,
)
from contract.identity import Role
from engine.client import InProcessClient, ProcessClient
from engine.connecting import Transfers
from protos import worker_pb2 as pb
from protos import worker_pb2_grpc
from roles.table import ROLES, STAGES
from router.service import RouterService
from router.settings import RouterSettings
from serving.cluster_tls import router_tls, worker_name
from tests.engine_scheduling.stepping import fake_settings
from tests.fakes.engine.fakes import start_fake_executor
from tests.fakes.engine.transfer import fake_connector_factory
from tests.private_files import write_private
from tests.text.tiny_model import model_files, write_model
from tests.worker.ordering import Ordered, give_order
from worker.registration import WorkerIdentity
from worker.service import open_ports
from worker.settings import WorkerSettings
from worker.worker import Worker

SECRET = "a secret of the tests, of 32 or more characters"
FREE: dict[str, Any] = dict.fromkeys(("http", "grpc", "internal", "admin"), "127.0.0.1:0")


@dataclass
class Running:
    """One attached worker, a stub that calls it, and the router, which orders."""

    worker: Worker
    stub: Any
    router: RouterService
    run: asyncio.Task[None]

    async def call(self, name: str, request: Any) -> Any:
        return await getattr(self.stub, name)(request)

    async def order(self, ordered: Ordered) -> None:
        """Let the router order a leg or a cancel; see ``give_order``."""
        await self.router.wait_for_workers(1)
        (attached,) = self.router._path.registry.workers
        await give_order(attached, ordered)


@asynccontextmanager
async def running(
    role: Role,
    folder: Path,
    client: type[InProcessClient | ProcessClient] = InProcessClient,
    changes: Mapping[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[Running]:
    """Run a worker between a router and a fake engine. changes: of the settings. options: of the engine's client."""
    async with AsyncExitStack() as stack:
        router = RouterService(RouterSettings(**FREE, secret=SECRET))
        await router.start()
        stack.push_async_callback(router.stop)
        settings = worker_settings(folder, router.addresses.internal).model_copy(update=dict(changes or {}))
        engine = await client.start(
            fake_settings(), Transfers(fake_connector_factory, STAGES), start=start_fake_executor, **options
        )
        stack.push_async_callback(engine.shutdown)
        worker = Worker(WorkerIdentity(role, "w", "boot"), ROLES, settings, engine)
        addresses = await stack.enter_async_context(open_ports(worker, settings))
        run = asyncio.create_task(worker.run(addresses["grpc"], addresses["admin"]))
        stack.push_async_callback(asyncio.wait, [run])
        stack.callback(run.cancel)
        await worker.wait_ready()
        channel = router_tls(SECRET).channel(addresses["grpc"], worker_name("w", "boot"), [])
        await stack.enter_async_context(channel)
        yield Running(worker, worker_pb2_grpc.WorkerStub(channel), router, run)


def worker_settings(folder: Path, router: str) -> WorkerSettings:
    model, secret_file = folder / "model", folder / "secret"
    model.mkdir(exist_ok=True)
    write_model(model)
    write_private(secret_file, SECRET)
    return WorkerSettings(model=model, router=router, secret_file=secret_file)


def task(request_id: str = "r", max_tokens: int = 4, **fields: Any) -> pb.Task:
    sampling = pb.EngineSampling(top_p=1.0, max_tokens=max_tokens)
    fields = {"prompt_token_ids": [1, 2, 3], "sampling": sampling, "deadline_seconds": 60.0, **fields}
    return pb.Task(request_id=request_id, **fields)


def waiting_leg(request_id: str = "r", attempt: int = 0) -> pb.DecodeRequest:
    """Return a decode leg that waits for KV that is never sent."""
    source = pb.TransferSource(transfer_id="t", worker_id="p", boot_id="b", control_address="127.0.0.1:1")
    return pb.DecodeRequest(task=task(request_id, attempt=attempt, first_index=1), source=source)


async def until_accepted(running: Running, count: int) -> None:
    async with asyncio.timeout(10):
        while running.worker.num_requests != count:
            await asyncio.sleep(0.005)


def refusals() -> list[tuple[Role, Ordered, ErrorKind, str]]:
    invalid, missing = ErrorKind.INVALID_REQUEST, ErrorKind.INTERNAL
    source = pb.TransferSource(transfer_id="t", control_address="127.0.0.1:1")
    bad_sampling = pb.EngineSampling(temperature=9.0, top_p=1.0, max_tokens=1)
    return [
        (Role.PREFILL, pb.PrefillRequest(task=task()), invalid, "transfer_id"),
        (Role.PREFILL, pb.PrefillRequest(task=pb.Task(), transfer_id="t"), invalid, "prompt"),
        (
            Role.PREFILL,
            pb.DecodeRequest(task=task()),
            missing,
            "prefill worker does not serve Decode",
        ),
        (
            Role.DECODE,
            pb.DecodeRequest(task=task(first_index=1), source=pb.TransferSource()),
            invalid,
            "source",
        ),
        (Role.DECODE, pb.DecodeRequest(task=pb.Task(), source=source), invalid, "prompt"),
        (Role.DECODE, pb.PrefillRequest(task=task(), transfer_id="t"), missing, "Prefill"),
        (Role.DECODE, pb.EmbedLegRequest(task=task()), missing, "Embed"),
        (Role.AGGREGATED, pb.EmbedLegRequest(task=pb.Task()), invalid, "prompt"),
        (Role.PREFILL, pb.EmbedLegRequest(task=task(num_choices=2)), invalid, "one choice"),
        (Role.AGGREGATED, pb.PrefillRequest(task=task(), transfer_id="t"), missing, "Prefill"),
        (
            Role.AGGREGATED,
            pb.DecodeRequest(task=task(sampling=bad_sampling)),
            invalid,
            "temperature is 9.0",
        ),
        (
            Role.AGGREGATED,
            pb.DecodeRequest(task=task(prompt_token_ids=[10**6])),
            invalid,
            "vocabulary",
        ),
    ]


@pytest.mark.parametrize(("role", "ordered", "kind", "text"), refusals())
async def test_an_unserved_leg_is_rejected_with_the_reason(
    tmp_path: Path, role: Role, ordered: Ordered, kind: ErrorKind, text: str
) -> None:
    async with running(role, tmp_path) as it:
        with pytest.raises(KvbatonError) as caught:
            await it.order(ordered)
        assert caught.value.kind is kind
        assert text in caught.value.message
        assert it.worker.num_requests == 0


@pytest.mark.parametrize("role", [Role.AGGREGATED, Role.DECODE])
async def test_a_request_is_accepted_once_and_can_be_cancelled(tmp_path: Path, role: Role) -> None:
    """The same choice of the same attempt twice is refused; cancel ends it; a later attempt is another request."""
    async with running(role, tmp_path) as it:
        await it.order(waiting_leg())
        with pytest.raises(InvalidRequestError, match="already running"):
            await it.order(waiting_leg())
        await it.order(waiting_leg(attempt=1))
        assert it.worker.num_requests == 2
        await it.order(pb.CancelRequest(request_id="r", attempt=0))
        await until_accepted(it, 1)
        await it.order(pb.CancelRequest(request_id="r", attempt=1))
        await until_accepted(it, 0)


@pytest.mark.parametrize("role", [Role.AGGREGATED, Role.DECODE])
async def test_a_whole_request_runs_to_its_end(tmp_path: Path, role: Role) -> None:
    """Decode without a source: the prompt is computed here, on a decode worker too (no prefill worker is left)."""
    async with running(role, tmp_path) as it:
        await it.order(pb.DecodeRequest(task=task()))
        await until_accepted(it, 0)
        assert (await it.worker.engine.call("counters"))["generation_tokens_total"] == 4


@pytest.mark.parametrize("role", [Role.AGGREGATED, Role.PREFILL])
async def test_an_embedding_runs_to_its_end(tmp_path: Path, role: Role) -> None:
    """A prefill worker needs no transfer for it; the model's pooling is read with each request."""
    async with running(role, tmp_path) as it:
        await it.order(pb.EmbedLegRequest(task=task()))
        await until_accepted(it, 0)
        counters = await it.worker.engine.call("counters")
        assert (counters["generation_tokens_total"], counters["requests_finished_total"]) == (0, 1)
        pooling = tmp_path / "model" / "1_Pooling"
        pooling.mkdir()
        (pooling / "config.json").write_text('{"pooling_mode_cls_token": true}')
        with pytest.raises(KvbatonError, match="cls_token"):
            await it.order(pb.EmbedLegRequest(task=task("s")))


async def test_losing_the_router_aborts_its_requests(tmp_path: Path) -> None:
    """A worker without a router holds no requests."""
    async with running(Role.DECODE, tmp_path) as it:
        await it.order(waiting_leg())
        await until_accepted(it, 1)
        await it.router.stop()
        await until_accepted(it, 0)
        assert not it.worker.is_ready
        await it.worker.engine.call("check_integrity")


async def test_the_router_learns_how_busy_a_worker_is(tmp_path: Path) -> None:
    """The load is sent with the tokens of a step, or from an idle engine; an unchanged load is not sent again."""
    heard: asyncio.Queue[Any] = asyncio.Queue()
    async with running(Role.DECODE, tmp_path, idle_seconds=0.01) as it, asyncio.timeout(20):
        await it.router.wait_for_workers(1)
        (attached,) = it.router._path.registry.workers
        attached.routes.bind(("r", 0, 0), heard.put_nowait)
        await it.order(waiting_leg())
        while attached.capacity.load.num_waiting == 0:
            await asyncio.sleep(0.005)
        told = attached.capacity.load
        await asyncio.sleep(0.05)
        assert attached.capacity.load is told
        await it.order(pb.CancelRequest(request_id="r"))
        assert (await heard.get()).finish_reason == "abort"
        assert (attached.capacity.load.num_running, attached.capacity.load.num_waiting) == (0, 0)


async def test_the_router_learns_the_model_from_the_worker(tmp_path: Path) -> None:
    """Law 9: the small files of the model folder are sent unchanged."""
    async with running(Role.AGGREGATED, tmp_path) as it:
        got: dict[str, bytes] = {}
        async for piece in it.stub.GetModelFiles(pb.GetModelFilesRequest()):
            got[piece.name] = got.get(piece.name, b"") + piece.data
        assert got == {name: data for name, data in model_files().items() if data}
        async with asyncio.timeout(10):
            await it.router.wait_ready()


async def test_a_router_with_another_secret_refuses_the_worker(tmp_path: Path) -> None:
    """The worker ends with the reason instead of retrying for ever."""
    router = RouterService(RouterSettings(**FREE, secret="another secret, which also has 32 characters"))
    await router.start()
    engine = await InProcessClient.start(
        fake_settings(), Transfers(fake_connector_factory, STAGES), start=start_fake_executor
    )
    try:
        settings = worker_settings(tmp_path, router.addresses.internal)
        worker = Worker(WorkerIdentity(Role.AGGREGATED, "w", "boot"), ROLES, settings, engine)
        with pytest.raises(
            IncompatiblePeerError, match="does not prove that it holds this worker's cluster secret"
        ):
            await worker.run("127.0.0.1:1", "127.0.0.1:2")
    finally:
        await engine.shutdown()
        await router.stop()


async def test_a_dead_engine_ends_the_worker(tmp_path: Path) -> None:
    """The supervisor restarts it; no request waits for an engine that is gone."""
    async with running(Role.AGGREGATED, tmp_path) as it:
        await it.worker.engine.shutdown()
        await asyncio.wait([it.run], timeout=10)
        assert "the engine of worker w has stopped" in str(it.run.exception())


async def test_a_killed_engine_is_a_lost_worker_to_its_requests(tmp_path: Path) -> None:
    """They end with the stream, not with an error of their own, and another worker may continue them."""
    heard: asyncio.Queue[Any] = asyncio.Queue()
    async with running(Role.DECODE, tmp_path, ProcessClient) as it, asyncio.timeout(20):
        await it.router.wait_for_workers(1)
        (attached,) = it.router._path.registry.workers
        attached.routes.bind(("r", 0, 0), heard.put_nowait)
        await it.order(waiting_leg())
        await until_accepted(it, 1)
        psutil.Process(await it.worker.engine.call("pid")).kill()
        assert isinstance(await heard.get(), WorkerLostError)
        await asyncio.wait([it.run])
    assert heard.empty()
    assert "has stopped" in str(it.run.exception())


def test_errors_about_a_secret_name_the_problem(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    write_private(empty, "\n")
    for path, text in ((None, "not set"), (tmp_path / "missing", "cannot be read"), (empty, "is empty")):
        with pytest.raises(SettingError, match=text):
            WorkerSettings(model=tmp_path, secret_file=path).read_secret()


def test_a_wildcard_host_needs_a_name_to_dial(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="advertise_host"):
        WorkerSettings(model=tmp_path, host="0.0.0.0")


def test_a_lease_must_outlast_a_peers_silence(tmp_path: Path) -> None:
    """Leases are renewed a few times per peer_timeout_seconds: a shorter lease would expire while its reader lives."""
    with pytest.raises(
        ValueError, match=r"lease_seconds is 0.5: it must be peer_timeout_seconds \(3.0\) or more"
    ):
        WorkerSettings(model=tmp_path, lease_seconds=0.5)
