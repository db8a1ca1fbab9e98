"""The ports for clients, HTTP and gRPC, and the batches that their requests create."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from prometheus_client.registry import Collector

from contract.addresses import is_loopback
from router.attempts.draining import Drain
from router.batches.service import BatchService
from router.client_access import ClientAccess
from router.grpc.port import GrpcPort
from router.http.app import build_app
from router.http.port import HttpPort
from router.http.routes import all_routes
from router.request_path import RequestPath
from router.settings import RouterSettings
from serving.descriptors import ConnectionCaps

logger = logging.getLogger(__name__)


class PublicApis:
    """Owns both ports and the batches between ``start`` and ``stop``."""

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
        self._http = HttpPort(build_app(routes, settings, clients, drain), settings, clients)
        self._grpc = GrpcPort(path, clients, settings)

    async def start(self, caps: ConnectionCaps) -> tuple[str, str]:
        """Continue the batches, listen, and return the real "host:port" of HTTP and of gRPC. Raises SettingError."""
        if self._batches:
            await self._batches.start()
        grpc = await self._grpc.start(caps.grpc)
        http = await self._http.start(caps.http)
        self._warn_if_open(http, grpc)
        return http, grpc

    async def report_health(self, is_ready: bool) -> None:
        """Set the answer of the gRPC health service."""
        await self._grpc.report_health(is_ready)

    def stop_listening(self, grace_seconds: float) -> None:
        """Accept no further connection at either port; what is open continues, gRPC calls for ``grace_seconds``."""
        self._http.stop_listening()
        self._grpc.stop_listening(grace_seconds)

    async def wait_answered(self) -> None:
        """Block until no HTTP request is being answered."""
        await self._http.wait_answered()

    def debug_state(self) -> dict[str, Any]:
        """Return the numbers for /debug/state."""
        return {
            "num_http_requests": self._http.num_answering,
            "num_held_bytes": self._clients.held.num_bytes,
        }

    async def stop(self, grace_seconds: float) -> None:
        """End running requests and batches and close both ports."""
        await self._http.close()
        await self._grpc.stop(grace_seconds)
        if self._batches:
            await self._batches.close()

    def _warn_if_open(self, *addresses: str) -> None:
        public = [address for address in addresses if not is_loopback(address)]
        if public and not self._clients.keys.are_required:
            logger.warning(
                "%s: other machines can reach this port without an API key; set api_keys_file",
                " and ".join(public),
            )
