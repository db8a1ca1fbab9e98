"""One router process: everything that it serves, started and stopped in order."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client.registry import Collector

from protos import inference_pb2, inference_pb2_grpc, worker_pb2_grpc
from router.admission_queue import AdmissionQueue
from router.batches.service import BatchService
from router.cancellation import CancellableRequests
from router.change_signal import ChangeSignal
from router.draining import Drain
from router.grpc_api import InferenceServicer
from router.held_bytes import HeldBytes
from router.http.app import build_app
from router.http.endpoints import Endpoints
from router.http.in_process import BodyAnswers
from router.inbox import UnreadBytes
from router.limits import MAX_PROMPTS
from router.membership import MembershipServicer
from router.metrics import RouterMetrics
from router.model_source import ModelSource
from router.pipeline import Pipeline
from router.readiness import what_is_missing
from router.registry import Registry
from router.request_preparer import RequestPreparer
from router.request_run import RequestRuns
from router.request_tracker import RequestTracker
from router.running_shares import RunningShares
from router.settings import RouterSettings
from router.tasks import TaskSet
from router.tenancy import TenantRules
from router.tokenizing import TokenizerThreads
from router.unreachable_pairs import UnreachablePairs
from serving.admin import AdminServer
from serving.api_keys import ApiKeys
from serving.cluster_tls import router_tls
from serving.descriptors import connection_caps, num_open_descriptors, raise_descriptor_limit
from serving.grpc_keys import ApiKeyInterceptor, authorization_of
from serving.grpc_messages import MessageInterceptor
from serving.grpc_options import internal_server_options, public_server_options
from serving.grpc_server import start_grpc
from serving.http_hosts import listed_hosts
from serving.http_server import HttpServer, start_http
from serving.settings import is_loopback
from serving.signals import until_stopped
from serving.tls import read_tls
from serving.wrong_keys import WrongKeys

logger = logging.getLogger(__name__)

_INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
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
        """By name."""
        return asdict(self)


class RouterService:
    """Owns all parts of a router between ``start`` and ``stop``. ``start`` is called once."""

    def __init__(self, settings: RouterSettings, clock: Callable[[], float] = time.time) -> None:
        """Take settings; clock: Unix seconds, by which files and batches expire. Raises SettingError."""
        self._settings = settings
        self._cluster = router_tls(settings.read_secret())
        self._changes = ChangeSignal()
        self._registry = Registry(self._changes, settings.worker_wait_seconds)
        self._models = ModelSource(self._changes, settings.served_model_name, settings.parsers)
        self._metrics = RouterMetrics()
        self._keys = ApiKeys(settings.api_keys, settings.api_keys_file)
        self._wrong_keys = WrongKeys()
        self._tls = read_tls(settings.tls_certificate_file, settings.tls_key_file)
        self._running = CancellableRequests()
        self._ledger = RequestTracker(settings.max_queue, self._metrics)
        self._tasks = TaskSet()
        severed = UnreachablePairs()
        shares = RunningShares(settings.max_key_share)
        self._line = AdmissionQueue(
            self._registry, self._changes, severed, shares, settings.worker_wait_seconds
        )
        unread = UnreadBytes(settings.client_buffer_bytes, settings.max_unread_bytes)
        relays = RequestRuns(self._line, severed, self._tasks, unread, settings.max_replays)
        self._tokenizers = TokenizerThreads()
        preparer = RequestPreparer(
            self._models,
            self._registry,
            self._tokenizers,
            TenantRules(settings.shared_prefix_cache, settings.max_priority),
            settings.request_timeout_seconds,
        )
        self._pipeline = Pipeline(self._models, preparer, self._ledger, relays)
        self._held = HeldBytes(settings.max_held_bytes)
        self._drain = Drain(self._ledger, self._running, self._until_answered, settings.drain_seconds)
        self._batches = self._batch_service(clock)
        self._health = health.aio.HealthServicer()
        self._watchers: list[asyncio.Task[None]] = []
        self._admin = AdminServer(
            settings.admin,
            missing=lambda: what_is_missing(self._models, self._registry),
            not_ready=lambda: self._drain.reason,
            state=self._debug_state,
            metrics=self._collector,
            allowed_hosts=listed_hosts(settings.allowed_hosts),
        )
        self._http: HttpServer | None = None
        self._public: grpc.aio.Server | None = None
        self._internal: grpc.aio.Server | None = None
        self._addresses: BoundAddresses | None = None

    @property
    def addresses(self) -> BoundAddresses:
        """Where it listens. Raises RuntimeError before ``start``."""
        if self._addresses is None:
            raise RuntimeError("the router has not been started")
        return self._addresses

    @property
    def pipeline(self) -> Pipeline:
        """What carries its requests; to be asked in the event loop of ``start``."""
        return self._pipeline

    @property
    def models(self) -> ModelSource:
        """What is served."""
        return self._models

    @property
    def is_ready(self) -> bool:
        """True when a request can be answered: the model is known and workers for both legs are attached."""
        return not self._drain.is_on and what_is_missing(self._models, self._registry) is None

    async def wait_ready(self) -> None:
        """Block until ``is_ready``."""
        changed = self._changes.next
        while not self.is_ready:
            await changed.wait()
            changed = self._changes.next

    async def wait_for_workers(self, count: int) -> None:
        """Block until so many workers are attached."""
        changed = self._changes.next
        while len(self._registry.workers) != count:
            await changed.wait()
            changed = self._changes.next

    async def start(self, *, has_public_ports: bool = True) -> None:
        """Listen on every port; without ``has_public_ports`` on those of workers and operators alone.

        Raises SettingError for a model or an address that cannot be used.
        """
        settings = self._settings
        if settings.model:
            await self._models.read_folder(settings.model)
        num_files = _FILES_OF_A_BATCH * settings.batches_max_open if self._batches else None
        limit = raise_descriptor_limit()
        caps = connection_caps(settings.max_connections, limit, num_open_descriptors(), num_files)
        self._internal, internal = await self._start_internal(caps.internal)
        http = public = ""
        if has_public_ports:
            if self._batches:
                await self._batches.start()
            self._public, public = await self._start_public(caps.grpc)
            http = await self._start_http(caps.http)
        await self._admin.start()
        self._addresses = BoundAddresses(http, public, internal, self._admin.address)
        self._warn_if_open()
        self._watchers = [
            asyncio.create_task(self._models.learn(self._registry), name="learn the model"),
            asyncio.create_task(self._tell_health(), name="tell gRPC health"),
        ]

    async def drain(self, at_once: asyncio.Event) -> None:
        """Take no new requests and let those that run end, for ``drain_seconds`` or until ``at_once``; then ``stop``."""
        self._drain.begin()
        self._changes.notify()
        await self._drain.run(at_once)

    async def _until_answered(self) -> None:
        if self._http:
            await self._http.until_answered()

    async def stop(self) -> None:
        """End running requests, close every port; nothing runs when this returns."""
        for watcher in self._watchers:
            watcher.cancel()
        if self._watchers:
            await asyncio.wait(self._watchers)
        if self._http:
            await self._http.close()
        if self._public:
            await self._public.stop(_STOP_GRACE_SECONDS)
        if self._batches:
            await self._batches.close()
        await self._tasks.close(_STOP_GRACE_SECONDS)
        if self._internal:
            self._registry.dismiss_all()
            await self._internal.stop(_STOP_GRACE_SECONDS)
        self._line.close()
        self._tokenizers.close()
        await self._admin.stop()
        self._models.close()

    def _batch_service(self, clock: Callable[[], float]) -> BatchService | None:
        settings = self._settings
        if settings.files_dir is None:
            return None
        max_answers = min(MAX_PROMPTS, settings.max_queue)
        service = BatchService(
            settings.files_dir,
            settings.files_bounds,
            BodyAnswers(
                self._pipeline,
                self._models,
                lambda: self.is_ready,
                max_answers,
                max_values=settings.max_body_values,
                is_strict=settings.strict_api,
            ),
            max_concurrency=settings.batches_max_concurrency,
            may_begin=lambda: self._ledger.num_unbound == 0 and not self._drain.is_on,
            count_result=self._metrics.batch_requests,
            clock=clock,
        )
        self._ledger.on_fewer_unbound(service.look)
        self._ledger.on_queued(self._look_at_queue_soon)
        return service

    def _look_at_queue_soon(self) -> None:
        """Have requests of batches give way in a moment, if the one that begins to wait has not found room by then."""
        asyncio.get_running_loop().call_soon(self._give_way)

    def _give_way(self) -> None:
        if self._batches and self.is_ready:
            self._batches.give_way(self._ledger.num_queued)

    async def _start_internal(self, max_connections: int) -> tuple[grpc.aio.Server, str]:
        options = internal_server_options(self._settings.peer_timeout_seconds, max_connections)
        server = grpc.aio.server(options=options)
        router_id = f"router-{secrets.token_hex(4)}"
        worker_pb2_grpc.add_MembershipServicer_to_server(
            MembershipServicer(
                self._registry,
                router_id,
                self._cluster,
                self._settings.accept_timeout_seconds,
                self._settings.peer_timeout_seconds,
            ),
            server,
        )
        credentials = self._cluster.server_credentials
        address = await start_grpc(server, self._settings.internal, param="internal", credentials=credentials)
        return server, address

    async def _start_public(self, max_connections: int) -> tuple[grpc.aio.Server, str]:
        messages = MessageInterceptor(
            _INFERENCE,
            read_seconds=self._settings.body_timeout_seconds,
            stall_seconds=self._settings.client_stall_seconds,
            tenant=lambda metadata: self._keys.tenant(authorization_of(metadata)),
            hold=self._held.holding,
        )
        server = grpc.aio.server(
            interceptors=[ApiKeyInterceptor(self._keys, self._wrong_keys), messages],
            options=public_server_options(
                self._settings.max_body_bytes,
                max_connections=max_connections,
                handshake_seconds=self._settings.header_timeout_seconds,
                idle_seconds=self._settings.idle_timeout_seconds,
                call_seconds=self._settings.request_timeout_seconds,
            ),
        )
        inference_pb2_grpc.add_InferenceServicer_to_server(
            InferenceServicer(
                self._pipeline,
                self._models,
                self._registry,
                self._running,
                self._keys,
                self._tokenizers,
                self._settings.client_stall_seconds,
            ),
            server,
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection(
            (_INFERENCE, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
        credentials = self._tls.credentials if self._tls else None
        address = await start_grpc(server, self._settings.grpc, param="grpc", credentials=credentials)
        return server, address

    def _warn_if_open(self) -> None:
        """Say that strangers may ask, where that is so."""
        public = [a for a in (self.addresses.http, self.addresses.grpc) if a and not is_loopback(a)]
        if public and not self._keys.are_required:
            logger.warning(
                "%s can be reached from other machines and needs no API key; set api_keys_file",
                " and ".join(public),
            )

    async def _start_http(self, max_connections: int) -> str:
        endpoints = Endpoints(
            self._pipeline,
            self._models,
            self._registry,
            self._running,
            self._tokenizers,
            self._collector,
            self._settings,
            held=self._held,
            batches=self._batches,
            drain=self._drain,
            needs_key=self._keys.are_required,
        )
        self._http = await start_http(
            build_app(endpoints, self._settings, self._keys, self._wrong_keys, self._running, self._drain),
            self._settings.http,
            shutdown_timeout_seconds=_STOP_GRACE_SECONDS,
            tls=self._tls.context if self._tls else None,
            limits=self._settings.http_limits(max_connections),
        )
        return self._http.address

    async def _tell_health(self) -> None:
        status = health_pb2.HealthCheckResponse
        while True:
            changed = self._changes.next
            for name in ("", _INFERENCE):
                await self._health.set(name, status.SERVING if self.is_ready else status.NOT_SERVING)
            await changed.wait()

    async def _collector(self) -> Collector:
        """The metrics of this moment."""
        if self._batches:
            self._metrics.files(*await self._batches.gauges())
        self._metrics.now(self._ledger.num_waiting, self._ledger.num_running, self._registry.snapshot())
        return self._metrics

    async def _debug_state(self) -> dict[str, Any]:
        return {
            "addresses": self.addresses.as_dict(),
            "is_ready": self.is_ready,
            "model": self._models.card().name if self._models.is_known else None,
            "requests": self._ledger.num_by_state(),
            "num_in_line": len(self._line),
            "num_http_requests": self._http.connections.num_answering if self._http else 0,
            "num_held_bytes": self._held.num_bytes,
            "num_tasks": len(self._tasks),
            "workers": [worker.debug_state() for worker in self._registry.workers],
        }


async def serve(settings: RouterSettings, on_started: Callable[[BoundAddresses], None]) -> None:
    """Run a router until SIGTERM or SIGINT, and drain it then; a second signal ends it at once.

    ``on_started`` is called once it listens; workers may come then.
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
