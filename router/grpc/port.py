"""The public gRPC port: Inference, health and reflection."""

import asyncio
from collections.abc import Callable

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from protos import inference_pb2, inference_pb2_grpc
from router.client_access import ClientAccess
from router.grpc.servicer import InferenceServicer
from router.request_path import RequestPath
from router.settings import RouterSettings
from serving.grpc_front import GrpcFront, start_front
from serving.grpc_messages import ApiKeyInterceptor, MessageInterceptor, authorization_of
from serving.grpc_options import public_server_options
from serving.http_connections import address_of
from serving.penalties import CALL_SECONDS

_INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
_REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"


class GrpcPort:
    """Owns the gRPC server between ``start`` and ``stop``."""

    def __init__(self, path: RequestPath, clients: ClientAccess, settings: RouterSettings) -> None:
        self._path = path
        self._clients = clients
        self._settings = settings
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None
        self._front: GrpcFront | None = None
        self._stopping: asyncio.Task[None] | None = None

    async def start(self, max_connections: int) -> str:
        """Listen, and return the real "host:port". Raises SettingError."""
        settings = self._settings
        self._server = grpc.aio.server(
            interceptors=[
                ApiKeyInterceptor(self._clients.keys, self._note_wrong_key),
                MessageInterceptor(
                    _INFERENCE,
                    read_seconds=settings.body_timeout_seconds,
                    stall_seconds=settings.client_stall_seconds,
                    tenant=lambda metadata: self._clients.keys.tenant(authorization_of(metadata)),
                    hold=self._clients.held.holding,
                    on_open_call=self._note_call,
                ),
            ],
            options=public_server_options(
                settings.max_body_bytes,
                max_connections=max_connections,
                handshake_seconds=settings.header_timeout_seconds,
                idle_seconds=settings.idle_timeout_seconds,
                call_seconds=settings.request_timeout_seconds,
                ping_seconds=settings.stream_keep_alive_seconds,
            ),
        )
        servicer = InferenceServicer(self._path, self._clients, settings.client_stall_seconds)
        inference_pb2_grpc.add_InferenceServicer_to_server(servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (_INFERENCE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )
        # Reflection under its final name, which clients try first. Its messages are those of v1alpha, byte for byte.
        reflecting = reflection.aio.ReflectionServicer((_INFERENCE, health.SERVICE_NAME, _REFLECTION_V1))
        handler = grpc.stream_stream_rpc_method_handler(
            reflecting.ServerReflectionInfo,
            request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
            response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
        methods = {"ServerReflectionInfo": handler}
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(_REFLECTION_V1, methods),)
        )
        self._front, address = await start_front(
            self._server,
            settings.grpc,
            param="grpc",
            limits=settings.http_limits(max_connections),
            tls=self._clients.tls.grpc_context if self._clients.tls else None,
            is_shared=settings.reuse_port,
            penalties=self._clients.penalties,
        )
        return address

    async def report_health(self, is_ready: Callable[[], bool]) -> None:
        """Keep the answer of the health service, for the whole server and for Inference, until cancelled."""
        status = health_pb2.HealthCheckResponse
        while True:
            # taken before the report, so that a change during it is reported too
            changed = self._path.changes.next
            shown = status.SERVING if is_ready() else status.NOT_SERVING
            # "" is the whole server, which load balancers ask for
            for name in ("", _INFERENCE):
                await self._health.set(name, shown)
            await changed.wait()

    def stop_listening(self, grace_seconds: float) -> None:
        """Accept no further connection and no further call; open calls have ``grace_seconds``, or until ``stop``."""
        if self._front:
            self._front.stop_listening()
        if self._server and not self._stopping:
            # not awaited: it returns when the last open call has ended
            self._stopping = asyncio.create_task(self._server.stop(grace_seconds), name="stop the gRPC port")

    async def stop(self, grace_seconds: float) -> None:
        """Stop listening and end open calls. Does nothing before ``start``."""
        if self._server:
            await self._server.stop(grace_seconds)
        if self._stopping:
            await self._stopping
        if self._front:
            self._front.close()

    def _note_wrong_key(self, address: str) -> None:
        self._clients.wrong_keys.note(address)
        self._note_call(address)

    def _note_call(self, address: str) -> None:
        """Count a call without a key, which anyone can send at any rate."""
        self._clients.penalties.note(address_of((address,)), CALL_SECONDS)
