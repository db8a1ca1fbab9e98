"""Connections to an internal port that show no certificate, beside a peer that has one."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest

from contract.addresses import split_address
from serving.cluster_tls import ROUTER_NAME, router_tls, worker_tls
from serving.grpc_options import internal_channel_options, internal_server_options, start_grpc
from serving.grpc_unauthenticated import MAX_UNSEEN, UnauthenticatedConnections

SECRET = "the secret of this cluster, 32+ chars"
MOST, PER_ADDRESS, MANY = 12, 6, 80


@dataclass
class Port:
    """An internal port with one method, whose answer comes when ``release`` is set."""

    address: str
    unauthenticated: UnauthenticatedConnections
    release: asyncio.Event

    @asynccontextmanager
    async def peer(self) -> AsyncIterator[Any]:
        """Yield the method, over a connection with a certificate."""
        tls = worker_tls(SECRET, "w", "boot")
        async with tls.channel(self.address, ROUTER_NAME, internal_channel_options()) as channel:
            yield channel.unary_unary("/test.Slow/Answer")

    def connect(self, local: str) -> socket.socket:
        """Return a connection from this address of the machine, whose handshake has begun and does not go on."""
        host, port = split_address(self.address)
        own = socket.create_connection((host, port), 20, (local, 0))
        own.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc")
        own.setblocking(False)
        return own


@asynccontextmanager
async def listening(host: str = "127.0.0.1") -> AsyncIterator[Port]:
    unauthenticated, release = UnauthenticatedConnections(MOST, PER_ADDRESS), asyncio.Event()

    async def answer(request: bytes, context: Any) -> bytes:
        unauthenticated.meet(context)
        if request == b"wait":
            await release.wait()
        return request

    server = grpc.aio.server(options=internal_server_options(3.0))
    methods: dict[str, Any] = {"Answer": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Slow", methods),))
    credentials = router_tls(SECRET).announcing_credentials(unauthenticated.on_handshake)
    address = await start_grpc(server, f"{host}:0", param="internal", credentials=credentials)
    unauthenticated.watch(address)
    try:
        yield Port(address, unauthenticated, release)
    finally:
        await server.stop(0)


@contextmanager
def flood(port: Port, *local: str) -> Iterator[list[list[socket.socket]]]:
    """Open many connections from each of these addresses."""
    with ExitStack() as stack:
        yield [[stack.enter_context(port.connect(each)) for _ in range(MANY)] for each in local]


def num_held(connections: list[socket.socket]) -> int:
    def is_held(one: socket.socket) -> bool:
        try:
            return bool(one.recv(1))
        except BlockingIOError:
            return True
        except OSError:
            return False

    return sum(map(is_held, connections))


async def until_few(connections: list[socket.socket], most: int) -> None:
    async with asyncio.timeout(20):
        while num_held(connections) > most:
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    ("host", "local"), [("127.0.0.1", "127.0.0.1"), ("[::1]", "::1"), ("localhost", "127.0.0.1")]
)
async def test_waiting_handshakes_are_ended_and_a_peer_with_a_certificate_is_not(
    host: str, local: str
) -> None:
    """A1: 2,560 connections that waited in their handshake took 134 MB; nothing bounded them below 16,384."""
    async with listening(host) as port, port.peer() as answer:
        waiting = answer(b"wait", timeout=60)
        async with asyncio.timeout(20):
            while not await answer(b"a"):
                pass
        with flood(port, local) as (unauthenticated,):
            await until_few(unauthenticated, PER_ADDRESS + MAX_UNSEEN)
            assert len(port.unauthenticated) <= PER_ADDRESS
            async with port.peer() as another:
                assert await another(b"b", timeout=20, wait_for_ready=True) == b"b"
        port.release.set()
        assert await waiting == b"wait"


async def test_a_flood_of_several_addresses_costs_the_one_with_the_most() -> None:
    """A1: an address with one connection keeps it, though it has waited longest."""
    async with listening() as port, port.peer() as answer:
        assert await answer(b"a", wait_for_ready=True) == b"a"
        with port.connect("127.0.0.9") as quiet:
            with flood(port, "127.0.0.2", "127.0.0.3", "127.0.0.4") as floods:
                unauthenticated = [one for each in floods for one in each]
                await until_few(unauthenticated, MOST + MAX_UNSEEN)
                assert len(port.unauthenticated) <= MOST
            assert num_held([quiet]) == 1
        assert await answer(b"b") == b"b"


async def test_a_peer_that_has_called_is_known_at_the_next_look() -> None:
    """A1: its call may come before the look that finds its connection."""
    async with listening() as port, port.peer() as answer:
        for _ in range(3):
            port.unauthenticated.on_handshake()
            assert await answer(b"a", wait_for_ready=True) == b"a"
        assert len(port.unauthenticated) == 0
        async with port.peer() as another:
            assert await another(b"b", wait_for_ready=True) == b"b"
            with port.connect("127.0.0.1"):
                async with asyncio.timeout(20):
                    while len(port.unauthenticated) != 1:
                        port.unauthenticated.on_handshake()
                        await asyncio.sleep(0.02)
                assert len(port.unauthenticated._seen) == 3


async def test_a_socket_that_has_its_descriptor_now_is_left_alone() -> None:
    """A1: a connection that has gone since the last look must not cost another connection its life."""
    async with listening() as port:
        with ExitStack() as stack:
            for _ in range(PER_ADDRESS):
                stack.enter_context(port.connect("127.0.0.1"))
            async with asyncio.timeout(20):
                while len(port.unauthenticated) < PER_ADDRESS:
                    port.unauthenticated.on_handshake()
                    await asyncio.sleep(0.02)
            known = list(port.unauthenticated._seen.values())
            left, right = socket.socketpair()
            with left, right:
                for one in known:
                    one._descriptor = left.fileno()
                    one.abort()
                left.send(b"x")
                assert right.recv(1) == b"x"
                assert os.fstat(left.fileno()).st_ino not in port.unauthenticated._seen
