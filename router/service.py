"""One router process: its parts, started, drained and stopped in order."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from router.admin.api import ScalingAdmin, WorkerAdmin, admin_access
from router.admin.inspection import Inspection
from router.admin.reloading import ReloadAdmin
from router.admin.scaling import ScalingLeases, ScalingReports
from router.attempts.draining import Drain
from router.client_access import client_access
from router.http.batch_answers import BatchAnswers
from router.intake.model_source import ModelSource
from router.migration.evacuation import Evacuation
from router.migration.migrator import Migrator
from router.migration.standing_orders import StandingOrders
from router.pipeline import Pipeline
from router.ports.membership import WorkerPort
from router.ports.public_apis import PublicApis, build_batches
from router.request_path import RequestPath
from router.settings import RouterSettings
from router.telemetry.metrics import RouterMetrics
from serving.admin import AdminServer
from serving.http_acceptor import (
    connection_caps,
    num_open_descriptors,
    raise_descriptor_limit,
)
from serving.http_hosts import listed_hosts
from serving.signals import until_stopped

_STOP_GRACE_SECONDS = 1.0
_FILES_OF_A_BATCH = 3


@dataclass(frozen=True)
class BoundAddresses:
    """The real "host:port" of each port of a router; empty for a port that it does not have."""

    http: str
    grpc: str
    internal: str
    admin: str

    def as_dict(self) -> dict[str, str]:
        """Return the addresses by name."""
        return asdict(self)


class RouterService:
    """Owns all parts of a router between ``start`` and ``stop``. Call ``start`` once.

    clock: returns Unix seconds, for the expiry of files and batches. Raises SettingError.
    """

    def __init__(self, settings: RouterSettings, clock: Callable[[], float] = time.time) -> None:
        self._settings = settings
        metrics = RouterMetrics(settings.goals)
        scaling = ScalingReports(metrics.scaling)
        self._path = RequestPath(settings, metrics.requests, scaling.wakes)
        standing = StandingOrders()
        migrator = Migrator(self._path.registry, self._path.runs, metrics.moves)
        evacuation = Evacuation(
            self._path.registry,
            self._path.runs,
            migrator,
            self._path.tasks,
            self._path.changes,
            metrics.drains,
            standing=standing,
        )
        self._worker_port = WorkerPort(self._path.registry, evacuation, settings)
        clients = client_access(settings)
        self._drain = Drain(
            self._path.tracker,
            clients.running,
            lambda: self._public.http.wait_answered(),
            settings.drain_seconds,
        )
        batches = build_batches(settings, self._path, self._drain, metrics.batches, clock)
        self._inspection = Inspection(
            self._path, metrics, scaling, standing, batches, settings.aliases, settings.num_restarts
        )
        self._public = PublicApis(
            settings, self._path, clients, self._drain, batches, self._inspection.collector
        )
        access = admin_access(settings, clients)
        self._admin = AdminServer(
            settings.admin,
            missing=lambda: self._path.missing,
            degraded=lambda: self._path.degraded,
            not_ready=lambda: self._drain.reason,
            state=self._debug_state,
            metrics=self._inspection.collector,
            allowed_hosts=listed_hosts(settings.allowed_hosts),
            access=access,
            routes=[
                *WorkerAdmin(self._path, access, standing, self._inspection.facts).routes(),
                *ReloadAdmin(self._path, access).routes(),
                *ScalingAdmin(scaling, ScalingLeases(metrics.scaling), self._inspection.pools).routes(),
            ],
        )
        self._watchers: list[asyncio.Task[None]] = []
        self._addresses: BoundAddresses | None = None

    @property
    def addresses(self) -> BoundAddresses:
        """The addresses of all ports. Raises RuntimeError before ``start``."""
        if self._addresses is None:
            raise RuntimeError("the router has not been started")
        return self._addresses

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline of all requests; to be used in the event loop of ``start``."""
        return self._path.pipeline

    @property
    def models(self) -> ModelSource:
        """The source of the served model."""
        return self._path.models

    @property
    def line_answers(self) -> BatchAnswers:
        """Answers to the bodies of HTTP requests without HTTP, at the priority that each body has."""
        path = self._path
        return BatchAnswers(
            path.pipeline, path.models, lambda: self.is_ready, self._settings, is_background=False
        )

    @property
    def is_ready(self) -> bool:
        """True if a request can be answered: the model is known, and workers for all legs are attached."""
        return not self._drain.is_on and self._path.missing is None

    async def wait_ready(self) -> None:
        """Block until ``is_ready``."""
        await self._path.wait_until(lambda: self.is_ready)

    async def wait_for_workers(self, count: int) -> None:
        """Block until ``count`` workers are attached."""
        await self._path.wait_until(lambda: len(self._path.registry.workers) == count)

    async def start(self, *, has_public_ports: bool = True) -> None:
        """Listen on every port; without ``has_public_ports`` only on that for workers.

        Raises SettingError for a model or an address that cannot be used.
        """
        settings = self._settings
        if settings.model:
            await self._path.models.read_folder(settings.model)
        num_files = _FILES_OF_A_BATCH * settings.batches_max_open if settings.files_dir else None
        limit = raise_descriptor_limit()
        caps = connection_caps(settings.max_connections, limit, num_open_descriptors(), num_files)
        internal = await self._worker_port.start(caps.internal)
        http, grpc = await self._public.start(caps) if has_public_ports else ("", "")
        if has_public_ports:
            await self._admin.start()
        admin = self._admin.address if has_public_ports else ""
        self._addresses = BoundAddresses(http, grpc, internal, admin)
        self._watchers = [
            asyncio.create_task(
                self._path.models.load_from_workers(self._path.registry), name="load the model"
            ),
            asyncio.create_task(
                self._public.grpc.report_health(lambda: self.is_ready), name="report gRPC health"
            ),
            asyncio.create_task(self._inspection.sample(), name="sample recent counts"),
        ]

    async def drain(self, at_once: asyncio.Event) -> None:
        """Reject new requests and let running ones end, for ``drain_seconds`` or until ``at_once``. Call ``stop`` then.

        Ports that other routers share are closed first, so that new connections reach one of those.
        """
        if self._settings.reuse_port:
            self._public.stop_listening(self._settings.drain_seconds)
        # before the change is notified, so that /ready and gRPC's health already fail
        self._drain.begin()
        self._path.changes.notify()
        await self._drain.run(at_once)

    async def stop(self) -> None:
        """End running requests and close every port; nothing runs when this returns."""
        # first, since what ends from here on was ended by the router and not by its clients
        self._path.tracker.end_all()
        for watcher in self._watchers:
            watcher.cancel()
        if self._watchers:
            await asyncio.wait(self._watchers)
        await self._public.stop(_STOP_GRACE_SECONDS)
        await self._path.tasks.close(_STOP_GRACE_SECONDS)
        await self._worker_port.stop(_STOP_GRACE_SECONDS)
        await self._admin.stop()
        self._path.close()

    async def _debug_state(self) -> dict[str, Any]:
        return {
            "addresses": self.addresses.as_dict(),
            "is_ready": self.is_ready,
            **self._inspection.debug_state(),
            **self._public.debug_state(),
        }


async def serve(settings: RouterSettings, on_started: Callable[[BoundAddresses], None]) -> None:
    """Run a router until SIGTERM or SIGINT and drain it then; a second signal ends it at once.

    ``on_started`` is called once it listens; workers can attach from then on.
    """
    async with until_stopped() as stopped:
        service = RouterService(settings)
        try:
            await service.start()
            on_started(service.addresses)
            await stopped.wait()
            await service.drain(stopped.at_once)
        finally:
            await service.stop()
