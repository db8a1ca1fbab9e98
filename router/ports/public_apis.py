"""The ports for clients, HTTP and gRPC, and the batches that their requests create."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from prometheus_client.registry import Collector

from contract.addresses import is_loopback
from router.attempts.draining import Drain
from router.batches.service import BatchService
from router.batches.store import FolderLimits
from router.client_access import ClientAccess
from router.grpc.port import GrpcPort
from router.http.batch_answers import BatchAnswers
from router.http.port import HttpPort, build_app
from router.http.routes import all_routes
from router.request_path import RequestPath
from router.settings import RouterSettings
from router.telemetry.metrics import BatchMetrics
from serving.http_acceptor import ConnectionCaps

logger = logging.getLogger(__name__)


class PublicApis:
    """Owns both ports, ``http`` and ``grpc``, and the batches between ``start`` and ``stop``."""

    def __init__(
        self,
        settings: RouterSettings,
        path: RequestPath,
        clients: ClientAccess,
        drain: Drain,
        batches: BatchService | None,
        collector: Callable[[], Awaitable[Collector]],
    ) -> None:
        self._clients = clients
        self._batches = batches
        routes = all_routes(settings, path, clients, drain, batches, collector)
        self.http = HttpPort(build_app(routes, settings, clients, drain), settings, clients)
        self.grpc = GrpcPort(path, clients, settings)

    async def start(self, caps: ConnectionCaps) -> tuple[str, str]:
        """Continue the batches, listen, and return the real "host:port" of HTTP and of gRPC. Raises SettingError."""
        if self._batches:
            await self._batches.start()
        grpc = await self.grpc.start(caps.grpc)
        http = await self.http.start(caps.http)
        public = [address for address in (http, grpc) if not is_loopback(address)]
        if public and not self._clients.keys.are_required:
            logger.warning(
                "%s: other machines can reach this port without an API key; set api_keys_file",
                " and ".join(public),
            )
        return http, grpc

    def stop_listening(self, grace_seconds: float) -> None:
        """Accept no further connection at either port; what is open continues, gRPC calls for ``grace_seconds``."""
        self.http.stop_listening()
        self.grpc.stop_listening(grace_seconds)

    def debug_state(self) -> dict[str, Any]:
        """Return the numbers for /debug/state."""
        return {
            "num_http_requests": self.http.num_answering,
            "num_held_bytes": self._clients.held.num_bytes,
        }

    async def stop(self, grace_seconds: float) -> None:
        """End running requests and batches and close both ports."""
        await self.http.close()
        await self.grpc.stop(grace_seconds)
        if self._batches:
            await self._batches.close()


def build_batches(
    settings: RouterSettings,
    path: RequestPath,
    drain: Drain,
    metrics: BatchMetrics,
    clock: Callable[[], float],
) -> BatchService | None:
    """Return the service, not started; None if ``settings`` have no folder for files. clock: Unix seconds.

    Requests of batches begin when no other request waits for workers. A running one is preempted when another request
    starts to wait and has not got workers by the event loop's next turn.
    """
    if settings.files_dir is None:
        return None

    def is_ready() -> bool:
        return not drain.is_on and path.missing is None

    service = BatchService(
        settings.files_dir,
        FolderLimits(
            file_bytes=settings.files_max_bytes,
            total_bytes=settings.files_total_bytes,
            count=settings.files_max_count,
            open_batches=settings.batches_max_open,
            key_share=settings.files_key_share,
            retention_seconds=settings.files_retention_seconds,
            batch_lines=settings.batches_max_lines,
            line_bytes=settings.max_body_bytes,
        ),
        BatchAnswers(path.pipeline, path.models, is_ready, settings),
        max_concurrency=settings.batches_max_concurrency,
        may_begin=lambda: path.tracker.num_unbound == 0 and not drain.is_on,
        count_result=metrics.count_requests,
        clock=clock,
    )

    def preempt() -> None:
        # without workers a request waits for them, and would not run earlier
        if is_ready():
            service.gate.preempt(path.tracker.num_queued)

    def preempt_soon() -> None:
        # a request may get workers in the same turn, and then no batch has to give way
        asyncio.get_running_loop().call_soon(preempt)

    path.tracker.on_fewer_unbound(service.gate.admit)
    path.tracker.on_queued(preempt_soon)
    return service
