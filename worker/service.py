"""Starts one worker in order (engine, gRPC, admin, router) and stops it again.

``WorkerServicer`` is the gRPC service, the same for all roles: what a router calls beside its orders on the Attach stream.
``DrainAdmin`` is ``POST /drain`` and ``POST /undrain`` on the admin port, for a hook that runs before the worker is stopped.
That port asks for an admin key if the worker has keys, and otherwise accepts the worker's own user and root on this machine.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import Any

import grpc
import grpc.aio
from aiohttp import web
from prometheus_client.registry import Collector

from contract.addresses import join_address, split_address
from contract.errors import InvalidRequestError, KvbatonError, SettingError
from contract.identity import Role, new_boot_id
from contract.membership import ReloadOrder
from contract.model_folder import MAX_TOKENIZER_BYTES, read_bytes
from data_parallel.gate import join_group
from engine.client import InProcessClient, ProcessClient
from engine.connecting import Transfers
from engine.scheduling.remote_kv import TransferStages
from kv_transfer.connector import TransferFactory
from protos import worker_pb2 as pb
from protos import worker_pb2_grpc
from serving.admin import AdminServer, seconds_in
from serving.admin_access import AdminAccess
from serving.errors import grpc_code
from serving.grpc_options import internal_server_options, start_grpc
from serving.grpc_unauthenticated import UnauthenticatedConnections
from serving.http_acceptor import internal_connections, num_open_descriptors, raise_descriptor_limit
from serving.http_hosts import listed_hosts
from serving.logs import configure_logs, log_settings
from serving.metrics import AliasCollector, EngineCollector
from serving.settings import first_listed
from serving.signals import until_stopped
from text.model_card import MODEL_FILES
from wire.legs import decode_from_proto, hand_off_from_proto
from wire.messages import from_proto, to_proto
from worker.cores import run_on, set_niceness
from worker.loop_watch import LoopWatch
from worker.registration import WorkerIdentity
from worker.role_rules import Roles
from worker.settings import WorkerSettings
from worker.worker import Worker

logger = logging.getLogger(__name__)


_CHUNK_BYTES = 2**20
OnReady = Callable[[dict[str, Any]], None]
_Started = tuple[Worker, dict[str, Any]]
_STOP_GRACE_SECONDS = 0.5
_CLIENTS: dict[str, type[InProcessClient] | type[ProcessClient]] = {
    "process": ProcessClient,
    "in-process": InProcessClient,
}
"""The clients of an engine, by the setting ``engine``."""


async def serve_worker(
    role: Role, roles: Roles, stages: TransferStages, settings: WorkerSettings, on_ready: OnReady
) -> None:
    """Run a worker until SIGTERM or SIGINT, and drain it then; ``on_ready`` gets its addresses once a router is attached.

    role: the one in which it starts; it may take each of ``roles`` later. stages: those of the engine, for all roles.
    Ends the process if its event loop hangs. Raises KvbatonError when the engine cannot start or dies, or when
    the router refuses the worker.
    """
    # Before any thread or process is started: each inherits the cores and the niceness of the one that starts it.
    run_on(settings.core_numbers)
    set_niceness(settings.nice)
    with LoopWatch(settings.step_timeout_seconds):
        await _serve_until_stopped(running_worker(role, roles, stages, settings), on_ready)


async def _serve_until_stopped(running: AbstractAsyncContextManager[_Started], on_ready: OnReady) -> None:
    async with until_stopped() as stopped, AsyncExitStack() as stack:
        started = await _start(stack, running, stopped)
        if started is None:
            return
        worker, addresses = started

        async def announce() -> None:
            await worker.wait_ready()
            on_ready({**addresses, "pid": os.getpid(), "worker_id": worker.identity.worker_id})

        run = asyncio.create_task(worker.run(addresses["grpc"], addresses["admin"]))
        ready = asyncio.create_task(announce())
        stop = asyncio.create_task(stopped.wait())
        try:
            done, _ = await asyncio.wait({run, stop, ready}, return_when=asyncio.FIRST_COMPLETED)
            if ready in done:
                ready.result()
                await asyncio.wait({run, stop}, return_when=asyncio.FIRST_COMPLETED)
            if run.done():
                run.result()
            await _stop(worker, run, stopped.at_once)
        finally:
            for task in (run, ready, stop):
                task.cancel()
            await asyncio.gather(run, ready, stop, return_exceptions=True)


async def _start(
    stack: AsyncExitStack, running: AbstractAsyncContextManager[_Started], stopped: asyncio.Event
) -> _Started | None:
    """Enter ``running``; None if a signal arrives first, which ends the engine that loads its model."""
    start = asyncio.create_task(stack.enter_async_context(running))
    stop = asyncio.create_task(stopped.wait())
    try:
        await asyncio.wait({start, stop}, return_when=asyncio.FIRST_COMPLETED)
        return None if stopped.is_set() else start.result()
    finally:
        start.cancel()
        stop.cancel()
        # A signal to the whole group, as systemd sends it, may have ended the start with an error, too.
        await asyncio.gather(start, stop, return_exceptions=True)


async def _stop(worker: Worker, run: asyncio.Task[None], at_once: asyncio.Event) -> None:
    """Drain the worker and let it leave. Raises UnavailableError if its engine dies meanwhile."""
    stop = asyncio.create_task(worker.stop(at_once))
    try:
        await asyncio.wait({run, stop}, return_when=asyncio.FIRST_COMPLETED)
        (stop if stop.done() else run).result()
    finally:
        stop.cancel()
        await asyncio.wait({stop})


@asynccontextmanager
async def running_worker(
    role: Role, roles: Roles, stages: TransferStages, settings: WorkerSettings
) -> AsyncIterator[tuple[Worker, dict[str, Any]]]:
    """Run a worker with its engine, gRPC port and admin port within the block."""
    identity = WorkerIdentity(role, settings.worker_id or f"{role.value}-{new_boot_id()[:6]}", new_boot_id())
    log_settings(logger, settings)
    factory = TransferFactory(settings.transfer(identity.role, identity.worker_id, identity.boot_id))
    level = logging.getLevelName(logging.getLogger().getEffectiveLevel())
    prepare = partial(configure_logs, f"{identity.worker_id}/engine", level)
    group = settings.group()
    gate = None if group is None else partial(join_group, group)
    transfers = Transfers(factory, stages)
    client = _CLIENTS[settings.engine]
    engine = await client.start(settings.engine_settings(), transfers, prepare=prepare, gate=gate)
    try:
        worker = Worker(identity, roles, settings, engine)
        async with open_ports(worker, settings) as addresses:
            yield worker, addresses
    finally:
        await engine.shutdown()


@asynccontextmanager
async def open_ports(worker: Worker, settings: WorkerSettings) -> AsyncIterator[dict[str, Any]]:
    """Open a worker's ports within the block and yield their addresses, ``grpc`` (as others dial it) and ``admin``.

    The worker's requests are aborted when the block ends.
    """
    most = internal_connections(raise_descriptor_limit(), num_open_descriptors())
    server = grpc.aio.server(options=internal_server_options(settings.peer_timeout_seconds, most))
    unauthenticated = UnauthenticatedConnections()
    worker_pb2_grpc.add_WorkerServicer_to_server(WorkerServicer(worker, unauthenticated.meet), server)
    access = AdminAccess(settings)
    admin = AdminServer(
        settings.admin,
        missing=worker.missing,
        not_ready=lambda: worker.drain.reason,
        state=worker.debug_state,
        metrics=_metrics(worker, settings),
        allowed_hosts=listed_hosts(settings.allowed_hosts),
        access=access,
        routes=DrainAdmin(worker, access).routes(),
    )
    async with AsyncExitStack() as stack:
        bound = await start_grpc(
            server,
            join_address(settings.host, settings.port),
            param="port",
            credentials=worker.tls.announcing_credentials(unauthenticated.on_handshake),
        )
        unauthenticated.watch(bound)
        stack.push_async_callback(server.stop, _STOP_GRACE_SECONDS)
        await admin.start()
        stack.push_async_callback(admin.stop)
        # Called first: the ports stay open until nothing runs any more.
        stack.push_async_callback(worker.abort_all)
        host, port = split_address(bound)
        yield {"grpc": join_address(settings.advertise_host or host, port), "admin": admin.address}


def _metrics(worker: Worker, settings: WorkerSettings) -> Callable[[], Awaitable[Collector]]:
    """Return the source of the worker's metrics."""
    model_name = first_listed(settings.served_model_name) or settings.model.name

    async def collect() -> Collector:
        info = {
            "worker": worker.identity.worker_id,
            "role": worker.lifecycle.role.value,
            "build": version("kvbaton"),
        }
        collector = EngineCollector(await worker.engine.call("counters"), info)
        return AliasCollector(collector, settings.aliases, lambda: model_name)

    return collect


class DrainAdmin:
    """Serves the drain of one worker on its admin port, which checks the access. access: names operators in the log."""

    def __init__(self, worker: Worker, access: AdminAccess) -> None:
        self._worker = worker
        self._access = access

    def routes(self) -> list[web.RouteDef]:
        """Return all paths."""
        return [web.post("/drain", self._drain), web.post("/undrain", self._undrain)]

    async def _drain(self, request: web.Request) -> web.Response:
        """Begin to drain, and wait until the worker is empty: 200, or 202 after ``wait`` seconds."""
        deadline = seconds_in(request, "deadline")
        wait = seconds_in(request, "wait") or 0.0
        self._worker.drain.begin(deadline, by=self._requester(request))
        is_empty = await self._worker.drain.wait_empty(wait)
        return self._state(200 if is_empty else 202)

    async def _undrain(self, request: web.Request) -> web.Response:
        self._worker.drain.undo(by=self._requester(request))
        return self._state(200)

    def _requester(self, request: web.Request) -> str:
        return f"the admin port for {self._access.requester(request)}"

    def _state(self, status: int) -> web.Response:
        worker = self._worker
        state = {
            "worker_id": worker.identity.worker_id,
            "state": worker.lifecycle.state.value,
            "is_empty": worker.drain.is_empty,
            "num_requests": worker.num_requests,
        }
        return web.json_response(state, status=status)


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Serves one worker. A refusal becomes the status of the call. meet: called with the context of each call."""

    def __init__(self, worker: Worker, meet: Callable[[Any], None]) -> None:
        self._worker = worker
        self._meet = meet

    async def HandOff(self, request: pb.HandOffRequest, context: Any) -> pb.Accepted:  # noqa: N802
        """Lend the KV of a choice that is being decoded, whatever the role is now."""
        self._meet(context)
        try:
            order, seconds = hand_off_from_proto(request)
            try:
                await self._worker.hand_off(order, seconds)
            except InvalidRequestError as error:  # the call is right; the state of the choice does not fit
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)
        except KvbatonError as error:
            await context.abort(grpc_code(error.kind), error.message)
        return pb.Accepted()

    async def Prepare(self, request: pb.DecodeRequest, context: Any) -> pb.Accepted:  # noqa: N802
        """Prepare for a choice that is going to be handed off to this worker."""
        self._meet(context)
        try:
            await self._worker.prepare(decode_from_proto(request))
        except KvbatonError as error:
            await context.abort(grpc_code(error.kind), error.message)
        return pb.Accepted()

    async def ResetPrefixCache(  # noqa: N802
        self, request: pb.ResetPrefixCacheRequest, context: Any
    ) -> pb.Accepted:
        """Drop the prefix cache, unless blocks are held."""
        self._meet(context)
        try:
            was_reset = await self._worker.engine.call("reset_prefix_cache")
        except KvbatonError as error:
            await context.abort(grpc_code(error.kind), error.message)
        if not was_reset:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, "requests or transfers hold blocks of its KV cache"
            )
        return pb.Accepted()

    async def ReloadWeights(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.ReloadOrder], context: Any
    ) -> AsyncIterator[pb.ReloadReport]:
        """Reload the weights, step by step; a call that ends early leaves the worker with those that it has."""
        self._meet(context)
        reload = self._worker.reload
        try:
            try:
                async with reload.pause():
                    yield pb.ReloadReport()
                    async for message in request_iterator:
                        order = from_proto(ReloadOrder, message)
                        if order.step == "load":
                            yield to_proto(pb.ReloadReport, await reload.load(order.epoch))
                        elif order.step == "serve":
                            reload.keep_epoch(order.epoch)
            except (
                InvalidRequestError,
                SettingError,
            ) as error:  # the call is right; the worker's state is not
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)
        except KvbatonError as error:
            await context.abort(grpc_code(error.kind), error.message)

    async def GetModelFiles(  # noqa: N802
        self, request: pb.GetModelFilesRequest, context: Any
    ) -> AsyncIterator[pb.ModelFile]:
        """Stream the small files of the model folder, in pieces."""
        self._meet(context)
        for name in MODEL_FILES:
            path = self._worker.model_folder / name
            # In a thread: a slow disk must not hold up the tokens of the worker's requests.
            data = await asyncio.to_thread(read_bytes, path, MAX_TOKENIZER_BYTES) or b""
            for start in range(0, len(data), _CHUNK_BYTES):
                yield pb.ModelFile(name=name, data=data[start : start + _CHUNK_BYTES])
