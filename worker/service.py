"""Starts one worker in order (engine, gRPC, admin, router) and stops it again."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import Any

import grpc.aio
from prometheus_client.registry import Collector

from contract.addresses import join_address, split_address
from contract.identity import Role, new_boot_id
from engine.client import EngineClient, ProcessClient
from kv_transfer.connector import TransferFactory
from protos import worker_pb2_grpc
from serving.admin import AdminServer
from serving.admin_access import AdminAccess
from serving.descriptors import internal_connections, num_open_descriptors, raise_descriptor_limit
from serving.grpc_options import internal_server_options
from serving.grpc_server import start_grpc
from serving.grpc_unauthenticated import UnauthenticatedConnections
from serving.http_hosts import listed_hosts
from serving.logs import configure_logs, log_settings
from serving.metric_aliases import AliasCollector
from serving.metrics import EngineCollector
from serving.settings import first_listed
from serving.signals import until_stopped
from worker.cores import run_on
from worker.drain_admin import DrainAdmin
from worker.loop_watch import LoopWatch
from worker.niceness import set_niceness
from worker.registration import WorkerIdentity
from worker.servicer import WorkerServicer
from worker.settings import WorkerSettings
from worker.worker import Worker

logger = logging.getLogger(__name__)

OnReady = Callable[[dict[str, Any]], None]
_Started = tuple[Worker, dict[str, Any]]
_STOP_GRACE_SECONDS = 0.5


async def serve_both(settings: WorkerSettings, on_ready: OnReady) -> None:
    """Run an aggregated worker until SIGTERM or SIGINT."""
    await serve_worker(Role.AGGREGATED, settings, on_ready)


async def serve_worker(role: Role, settings: WorkerSettings, on_ready: OnReady) -> None:
    """Run a worker until SIGTERM or SIGINT, and drain it then; ``on_ready`` gets its addresses once a router is attached.

    Ends the process if its event loop hangs. Raises KvbatonError when the engine cannot start or dies, or when
    the router refuses the worker.
    """
    run_on(settings.core_numbers)
    set_niceness(settings.nice)
    with LoopWatch(settings.step_timeout_seconds):
        await _serve_until_stopped(role, settings, on_ready)


async def _serve_until_stopped(role: Role, settings: WorkerSettings, on_ready: OnReady) -> None:
    async with until_stopped() as stopped, AsyncExitStack() as stack:
        started = await _started(stack, running_worker(role, settings), stopped)
        if started is None:
            return
        worker, addresses = started
        run = asyncio.create_task(worker.run(addresses["grpc"], addresses["admin"]))
        ready = asyncio.create_task(_announce(worker, addresses, on_ready))
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


async def _started(
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
    role: Role, settings: WorkerSettings
) -> AsyncIterator[tuple[Worker, dict[str, Any]]]:
    """Run a worker with its engine, gRPC port and admin port within the block."""
    identity = WorkerIdentity(role, settings.worker_id or f"{role.value}-{new_boot_id()[:6]}", new_boot_id())
    log_settings(logger, settings)
    engine = await _start_engine(identity, settings)
    try:
        worker = Worker(identity, settings, engine)
        async with exposed(worker, settings) as addresses:
            yield worker, addresses
    finally:
        await engine.shutdown()


@asynccontextmanager
async def exposed(worker: Worker, settings: WorkerSettings) -> AsyncIterator[dict[str, Any]]:
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
        stack.push_async_callback(worker.abort_all)
        host, port = split_address(bound)
        yield {"grpc": join_address(settings.advertise_host or host, port), "admin": admin.address}


async def _start_engine(identity: WorkerIdentity, settings: WorkerSettings) -> EngineClient:
    factory = TransferFactory(settings.transfer(identity.role, identity.worker_id, identity.boot_id))
    level = logging.getLevelName(logging.getLogger().getEffectiveLevel())
    prepare = partial(configure_logs, f"{identity.worker_id}/engine", level)
    return await ProcessClient.start(settings.engine(), factory, prepare=prepare)


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


async def _announce(worker: Worker, addresses: dict[str, Any], on_ready: OnReady) -> None:
    await worker.wait_ready()
    on_ready({**addresses, "pid": os.getpid(), "worker_id": worker.identity.worker_id})
