"""The public gRPC port: Inference, health and reflection."""

import asyncio

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
from serving.grpc_keys import ApiKeyInterceptor, authorization_of
from serving.grpc_messages import MessageInterceptor
from serving.grpc_options import public_server_options

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
                ApiKeyInterceptor(self._clients.keys, self._clients.wrong_keys),
                self._message_interceptor(),
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
        self._server.add_generic_rpc_handlers((_reflection_v1(),))
        self._front, address = await start_front(
            self._server,
            settings.grpc,
            param="grpc",
            limits=settings.http_limits(max_connections),
            tls=self._clients.tls.grpc_context if self._clients.tls else None,
            is_shared=settings.reuse_port,
        )
        return address

    async def report_health(self, is_ready: bool) -> None:
        """Set the answer of the health service, for the whole server and for Inference."""
        status = health_pb2.HealthCheckResponse
        for name in ("", _INFERENCE):
            await self._health.set(name, status.SERVING if is_ready else status.NOT_SERVING)

    def stop_listening(self, grace_seconds: float) -> None:
        """Accept no further connection and no further call; open calls have ``grace_seconds``, or until ``stop``."""
        if self._front:
            self._front.stop_listening()
        if self._server and not self._stopping:
            self._stopping = asyncio.create_task(self._server.stop(grace_seconds), name="stop the gRPC port")

    async def stop(self, grace_seconds: float) -> None:
        """Stop listening and end open calls. Does nothing before ``start``."""
        if self._server:
            await self._server.stop(grace_seconds)
        if self._stopping:
            await self._stopping
        if self._front:
            self._front.close()

    def _message_interceptor(self) -> MessageInterceptor:
        return MessageInterceptor(
            _INFERENCE,
            read_seconds=self._settings.body_timeout_seconds,
            stall_seconds=self._settings.client_stall_seconds,
            tenant=lambda metadata: self._clients.keys.tenant(authorization_of(metadata)),
            hold=self._clients.held.holding,
        )


def _reflection_v1() -> grpc.GenericRpcHandler:
    """Return reflection under its final name, which clients try first. Its messages are those of v1alpha, byte for byte."""
    servicer = reflection.aio.ReflectionServicer((_INFERENCE, health.SERVICE_NAME, _REFLECTION_V1))
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(_REFLECTION_V1, {"ServerReflectionInfo": handler})
