"""Calls that need no key, or have none, count as wasted time of their client's address."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from router.client_access import client_access
from router.grpc.port import GrpcPort
from router.settings import RouterSettings
from serving.penalties import ALLOWANCE_SECONDS, CALL_SECONDS, OPENING_SECONDS, Penalties

CLIENT = "127.0.0.1"


async def list_models(channel: grpc.aio.Channel) -> None:
    stub: Any = inference_pb2_grpc.InferenceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError, match="key"):
        await stub.ListModels(pb.ListModelsRequest())


async def check_health(channel: grpc.aio.Channel) -> None:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    await stub.Check(health_pb2.HealthCheckRequest())


@pytest.mark.parametrize(("call", "more"), [(list_models, 10), (check_health, 20)])
async def test_calls_without_a_key_are_counted(call: Any, more: int) -> None:
    """A rejected call counts twice: before it is accepted, which it never is, and when it is rejected."""
    settings = RouterSettings(grpc="127.0.0.1:0", api_keys="sk-right")
    penalties = Penalties(lambda: 100.0)
    clients = replace(client_access(settings), penalties=penalties)
    path: Any = SimpleNamespace(models=None, facts=None)  # no call gets as far as the path of requests
    port = GrpcPort(path, clients, settings)
    address = await port.start(max_connections=10)
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            await call(channel)
            penalties.note(CLIENT, ALLOWANCE_SECONDS - OPENING_SECONDS - 20 * CALL_SECONDS)
            for _ in range(4):
                await call(channel)
            assert not penalties.is_due(CLIENT)
            for _ in range(more):
                await call(channel)
            assert penalties.is_due(CLIENT)
    finally:
        await port.stop(0)
