"""Two routers of one user on one port: both get connections, and the end of one leaves the other's as they are."""

import asyncio
import socket
from contextlib import AsyncExitStack
from typing import Any

import grpc.aio
import pytest
from aiohttp import ClientSession, web
from grpc_health.v1 import health_pb2, health_pb2_grpc

from contract.errors import SettingError
from serving.grpc_front import GrpcFront, start_front
from serving.grpc_options import public_server_options
from serving.http_connections import HttpLimits
from serving.http_server import HttpServer, start_http

ENOUGH = 64
"""Connections of which each of two listeners gets at least one, but for one time in 2^63."""


async def serving(name: str, address: str, *, is_shared: bool = True) -> HttpServer:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=name)

    app = web.Application()
    app.router.add_get("/", answer)
    return await start_http(app, address, shutdown_timeout_seconds=0.1, is_shared=is_shared)


async def ask(address: str) -> str:
    """Send a request on a connection of its own."""
    async with ClientSession() as session, session.get(f"http://{address}/") as response:
        return await response.text()


async def test_http_connections_go_to_both_and_after_the_end_of_one_to_the_other() -> None:
    async with AsyncExitStack() as stack:
        first = await serving("first", "127.0.0.1:0")
        second = await serving("second", first.address)
        stack.push_async_callback(second.close)
        assert second.address == first.address
        answers = [await ask(first.address) for _ in range(ENOUGH)]
        assert set(answers) == {"first", "second"}
        await first.close()
        assert {await ask(second.address) for _ in range(ENOUGH)} == {"second"}


@pytest.mark.parametrize("is_shared", [True, False])
async def test_a_port_is_shared_only_if_both_say_so(is_shared: bool) -> None:
    """A free port is never shared by mistake: the second process that is configured for it ends with the reason."""
    async with AsyncExitStack() as stack:
        first = await serving("first", "127.0.0.1:0", is_shared=is_shared)
        stack.push_async_callback(first.close)
        with pytest.raises(SettingError, match="cannot listen there"):
            await serving("second", first.address, is_shared=not is_shared)


async def test_a_free_port_is_not_one_that_others_share() -> None:
    async with AsyncExitStack() as stack:
        addresses = set()
        for _ in range(20):
            server = await serving("one", "127.0.0.1:0")
            stack.push_async_callback(server.close)
            addresses.add(server.address)
        assert len(addresses) == 20


class Named(health_pb2_grpc.HealthServicer):
    """Answers every check with an error that has its name."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def Check(self, request: Any, context: Any) -> None:  # noqa: N802
        """Answer with the name."""
        await context.abort(grpc.StatusCode.NOT_FOUND, self._name)


async def grpc_serving(name: str, address: str) -> tuple[GrpcFront, grpc.aio.Server, str]:
    options = public_server_options(
        2**20,
        max_connections=1000,
        handshake_seconds=10,
        idle_seconds=10,
        call_seconds=10,
    )
    server = grpc.aio.server(options=options)
    health_pb2_grpc.add_HealthServicer_to_server(Named(name), server)
    front, bound = await start_front(server, address, param="grpc", limits=HttpLimits(), is_shared=True)
    return front, server, bound


async def name_at(address: str) -> str:
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
        except grpc.aio.AioRpcError as error:
            return str(error.details())
    raise AssertionError("the call ends with an error")


async def test_grpc_connections_go_to_both_and_after_the_end_of_one_to_the_other() -> None:
    front, first, address = await grpc_serving("first", "127.0.0.1:0")
    other, second, same = await grpc_serving("second", address)
    assert same == address
    try:
        assert {await name_at(address) for _ in range(ENOUGH)} == {"first", "second"}
        front.stop_listening()
        await first.stop(None)
        assert {await name_at(address) for _ in range(ENOUGH)} == {"second"}
    finally:
        await first.stop(None)
        await second.stop(None)
        front.close()
        other.close()


async def test_a_listener_that_stops_keeps_its_connections_and_leaves_new_ones_to_the_other() -> None:
    """A client that has connected gets its answer, whether or not the process has accepted the connection."""
    async with AsyncExitStack() as stack:
        first = await serving("first", "127.0.0.1:0")
        stack.push_async_callback(first.close)
        host, port = first.address.split(":")
        early = socket.create_connection((host, int(port)))  # the event loop does not run meanwhile
        stack.callback(early.close)
        early.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        first.stop_listening()
        second = await serving("second", first.address)
        stack.push_async_callback(second.close)
        assert {await ask(second.address) for _ in range(ENOUGH // 4)} == {"second"}
        answer = await asyncio.to_thread(early.makefile("rb").read)
        assert answer.endswith(b"first")
