"""Every port of a service, and what a stranger without key, certificate or secret can make it hold.

What is counted is what a stranger sees: how many of its connections the service keeps, and how much it takes before it
ends one.
"""

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from contract.addresses import split_address
from contract.identity import Role
from engine.client import InProcessClient
from engine.connecting import Transfers
from kv_transfer.links.framing import as_frame
from kv_transfer.links.listening import MAX_UNAUTHENTICATED
from protos import worker_pb2 as pb
from protos import worker_pb2_grpc
from roles.table import ROLES, STAGES
from router.service import RouterService
from router.settings import RouterSettings
from serving.cluster_tls import router_tls, worker_name
from serving.grpc_unauthenticated import MAX_PER_ADDRESS, MAX_UNSEEN
from tests.engine_scheduling.stepping import fake_settings
from tests.fakes.engine.fakes import start_fake_executor
from tests.fakes.engine.transfer import fake_connector_factory
from tests.http2 import HELLO, endless
from tests.kv_transfer.builders import Sides, hand_over, pair_of
from tests.worker.test_worker import SECRET, worker_settings
from worker.registration import WorkerIdentity
from worker.service import open_ports
from worker.worker import Worker

SECONDS = 0.5
MANY = 40
"""Connections beyond a port's limit."""
SOON = 30
PER_ADDRESS = 24
STRANGERS = MAX_PER_ADDRESS + MAX_UNSEEN
KEY = "k" * 32


@dataclass(frozen=True)
class Door:
    """A listening port. most: how many connections of one stranger it keeps. check: fails unless a good peer is served."""

    address: str
    most: int
    check: Callable[[], Awaitable[None]]

    async def connect(self) -> socket.socket:
        """Return a connection with a small buffer, so that what it has sent has been taken."""
        own = socket.socket()
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        own.setblocking(False)
        await asyncio.get_running_loop().sock_connect(own, split_address(self.address))
        return own


@asynccontextmanager
async def service(folder: Path) -> AsyncIterator[dict[str, Door]]:
    """Run a router and a worker of it, whose engine is a fake."""
    free: dict[str, Any] = dict.fromkeys(("http", "grpc", "internal", "admin"), "127.0.0.1:0")
    limits: dict[str, Any] = {"header_timeout_seconds": SECONDS, "max_connections_per_address": PER_ADDRESS}
    async with AsyncExitStack() as stack:
        router = RouterService(RouterSettings(**free, secret=SECRET, api_keys=KEY, **limits))
        await router.start()
        stack.push_async_callback(router.stop)
        settings = worker_settings(folder, router.addresses.internal)
        engine = await InProcessClient.start(
            fake_settings(), Transfers(fake_connector_factory, STAGES), start=start_fake_executor
        )
        stack.push_async_callback(engine.shutdown)
        worker = Worker(WorkerIdentity(Role.AGGREGATED, "w", "boot"), ROLES, settings, engine)
        bound = await stack.enter_async_context(open_ports(worker, settings))
        run = asyncio.create_task(worker.run(bound["grpc"], bound["admin"]))
        stack.push_async_callback(asyncio.wait, [run])
        stack.callback(run.cancel)
        await worker.wait_ready()
        at = router.addresses

        async def attach() -> None:
            """A worker that has lost its stream gets another one."""
            (attached,) = router._path.registry.workers
            attached.gone.set()
            async with asyncio.timeout(SOON):
                while attached in router._path.registry.workers or not router._path.registry.workers:
                    await asyncio.sleep(0.05)

        yield {
            "http": Door(at.http, PER_ADDRESS, lambda: answers(f"http://{at.http}/v1/models")),
            "grpc": Door(at.grpc, PER_ADDRESS, lambda: is_healthy(at.grpc)),
            "internal": Door(at.internal, STRANGERS, attach),
            "admin": Door(at.admin, 64, lambda: answers(f"http://{at.admin}/health")),
            "worker": Door(bound["grpc"], STRANGERS, lambda: is_called(bound["grpc"])),
            "worker admin": Door(bound["admin"], 64, lambda: answers(f"http://{bound['admin']}/health")),
        }


@asynccontextmanager
async def transfer_ports(_folder: Path) -> AsyncIterator[dict[str, Door]]:
    """Run two workers' connectors over TCP."""
    before = listening()
    with pair_of(Sides(*[{"peer_timeout_seconds": 10.0, "read_timeout_seconds": 10.0}] * 2)) as pair:
        controls = {worker.driver.address for worker in (pair.prefill, pair.decode)}
        numbers = iter(range(99))

        async def check() -> None:
            await asyncio.to_thread(hand_over, pair, f"r{next(numbers)}")

        await check()
        doors = {"control": Door(pair.prefill.driver.address, MAX_UNAUTHENTICATED, check)}
        for port in listening() - before - {split_address(control)[1] for control in controls}:
            doors[f"data of {port}"] = Door(f"127.0.0.1:{port}", 64, check)
        yield doors


def listening() -> set[int]:
    """Return the TCP ports of this process."""
    found = psutil.Process().net_connections("tcp")
    return {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN}


async def answers(url: str) -> None:
    """A 503 asks the client to try again: the connections of its address are too young to be ended for it."""
    headers = {"Authorization": f"Bearer {KEY}"}
    async with asyncio.timeout(SOON), aiohttp.ClientSession() as session:
        status = 503
        while status == 503:
            async with session.get(url, headers=headers) as response:
                status = response.status
            await asyncio.sleep(0.05)
        assert status == 200


async def is_healthy(address: str) -> None:
    async with grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=SOON, wait_for_ready=True)


async def is_called(address: str) -> None:
    async with router_tls(SECRET).channel(address, worker_name("w", "boot"), []) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            request = pb.HandOffRequest(request_id="unknown")
            stub: Any = worker_pb2_grpc.WorkerStub(channel)
            await stub.HandOff(request, timeout=SOON, wait_for_ready=True)
        assert caught.value.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT)


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def again(first: bytes, piece: bytes) -> Iterator[bytes]:
    yield first
    while True:
        yield piece


def noise(seed: int) -> Iterator[bytes]:
    rng = random.Random(seed)
    while True:
        yield rng.randbytes(rng.choice((1, 5, 100, 4096)))


STREAMS: dict[str, Callable[[], Iterator[bytes]]] = {
    "header lines": lambda: again(HEAD, b"X-A: " + b"v" * 1000 + b"\r\n"),
    "header line": lambda: again(HEAD + b"X-A: ", b"v" * 4096),
    "request line": lambda: again(b"GET /", b"v" * 4096),
    "empty lines": lambda: again(b"", b"\r\n" * 2000),
    "chunk extension": lambda: again(CHUNKED + b"5;", b"x" * 4096),
    "chunk size": lambda: again(CHUNKED, b"0" * 4096),
    "chunks of a byte": lambda: again(CHUNKED, b"1\r\nx\r\n" * 700),
    "trailers": lambda: again(CHUNKED + b"0\r\n", b"X-A: " + b"v" * 1000 + b"\r\n"),
    "header block": lambda: again(HELLO, next(endless("continuation"))),
    "TLS record": lambda: again(b"\x16\x03\x01\x40\x00", b"\x00" * 4096),
    "TLS handshake": lambda: again(b"", b"\x16\x03\x01\x10\x00\x01\xff\xff\xff" + b"\x03" * 4092),
    "frame": lambda: again((2**31).to_bytes(4, "little") + bytes(4), bytes(4096)),
    "frames": lambda: again(b"", as_frame(b"\x80") * 100),
    "nested frames": lambda: again(b"", as_frame(b"\x91" * 900 + b"\xc0")),
    "zeros": lambda: again(b"", bytes(4096)),
    "noise": lambda: noise(1),
    "other noise": lambda: noise(2),
    "more noise": lambda: noise(3),
}
"""Bytes without end; each kind is sent to every port."""

GROUPS = {"service": service, "transfer": transfer_ports}


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
async def test_bytes_without_end_end_the_connection(group: str, tmp_path: Path) -> None:
    """A1: whatever is sent. A port that reads what it throws away does so for a bounded time."""
    async with GROUPS[group](tmp_path) as doors:
        for name, door in doors.items():
            ended = [stream for stream in STREAMS if not await _ends(door, STREAMS[stream]())]
            assert ended == [], name
            await door.check()


async def _ends(door: Door, stream: Iterator[bytes]) -> bool:
    """Send until the port ends the connection; False if it does not."""
    own = await door.connect()
    loop = asyncio.get_running_loop()
    with own, suppress(ConnectionError):
        try:
            async with asyncio.timeout(SOON):
                for piece in stream:
                    await loop.sock_sendall(own, piece)
        except TimeoutError:
            return False
    return True


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("begin", [b"", b"\x16", b"P", b"\x10\x00\x00\x00"], ids=["", "TLS", "text", "frame"])
async def test_an_address_keeps_a_bounded_number_of_connections(
    group: str, begin: bytes, tmp_path: Path
) -> None:
    """A1: silent connections beyond a port's limit are ended, and a good peer is served beside those that stay."""
    async with GROUPS[group](tmp_path) as doors:
        for name, door in doors.items():
            with ExitStack() as stack:
                own = [stack.enter_context(await door.connect()) for _ in range(door.most + MANY)]
                for each in own:
                    with suppress(OSError):
                        each.send(begin)
                await until_few(own, door.most, name)
                await door.check()


async def until_few(connections: list[socket.socket], most: int, name: str) -> None:
    try:
        async with asyncio.timeout(SOON):
            while sum(map(_is_held, connections)) > most:
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"{name} keeps more than {most}") from None


def _is_held(own: socket.socket) -> bool:
    try:
        return bool(own.recv(2**16))
    except BlockingIOError:
        return True
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
async def test_a_byte_now_and_then_prolongs_nothing(group: str, tmp_path: Path) -> None:
    """A1: what a stranger has to send first has a deadline as a whole."""
    first = {"http": HEAD, "admin": HEAD, "worker admin": HEAD, "grpc": HELLO}
    async with GROUPS[group](tmp_path) as doors:
        async with asyncio.TaskGroup() as tasks:
            for name, door in doors.items():
                tasks.create_task(_drip(door, first.get(name, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc")))
        for door in doors.values():
            await door.check()


async def _drip(door: Door, text: bytes) -> None:
    with await door.connect() as own, suppress(ConnectionError):
        async with asyncio.timeout(SOON):
            for byte in text[:-4] + text[-4:-3] * 9999:
                if not _is_held(own):
                    return
                await asyncio.get_running_loop().sock_sendall(own, bytes((byte,)))
                await asyncio.sleep(0.1)
