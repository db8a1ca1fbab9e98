"""The internal gRPC port, where workers register."""

import secrets

import grpc
import grpc.aio

from protos import worker_pb2_grpc
from router.migration.evacuation import Evacuation
from router.ports.membership import MembershipServicer
from router.settings import RouterSettings
from router.workers.registry import Registry
from serving.cluster_tls import router_tls
from serving.grpc_options import internal_server_options
from serving.grpc_server import start_grpc
from serving.grpc_unauthenticated import UnauthenticatedConnections


class WorkerPort:
    """Owns the server between ``start`` and ``stop``. Raises SettingError without a usable cluster secret."""

    def __init__(self, registry: Registry, evacuation: Evacuation, settings: RouterSettings) -> None:
        self._registry = registry
        self._evacuation = evacuation
        self._settings = settings
        self._tls = router_tls(settings.read_secret())
        self._server: grpc.aio.Server | None = None

    async def start(self, max_connections: int) -> str:
        """Listen, and return the real "host:port". Raises SettingError."""
        peer_timeout = self._settings.peer_timeout_seconds
        unauthenticated = UnauthenticatedConnections()
        self._server = grpc.aio.server(options=internal_server_options(peer_timeout, max_connections))
        servicer = MembershipServicer(
            self._registry,
            self._evacuation,
            f"router-{secrets.token_hex(4)}",
            self._tls,
            self._settings.accept_timeout_seconds,
            peer_timeout,
            unauthenticated.meet,
        )
        worker_pb2_grpc.add_MembershipServicer_to_server(servicer, self._server)
        credentials = self._tls.announcing_credentials(unauthenticated.on_handshake)
        address = await start_grpc(
            self._server, self._settings.internal, param="internal", credentials=credentials
        )
        unauthenticated.watch(address)
        return address

    async def stop(self, grace_seconds: float) -> None:
        """Detach all workers and stop listening. Does nothing before ``start``."""
        if self._server:
            self._registry.dismiss_all()
            await self._server.stop(grace_seconds)
