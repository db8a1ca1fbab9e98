"""The worker's side of its one stream, with a router that does not do its part."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from contract.errors import IncompatiblePeerError
from protos import worker_pb2 as pb
from protos import worker_pb2_grpc
from serving.cluster_tls import router_tls, worker_tls
from serving.grpc_options import internal_server_options
from worker.link import RouterLink

SECRET = "a secret of the tests, of 32 or more characters"
STEP = pb.WorkerMessage(step=pb.StepOutput(entries=[pb.TokenEntry(request_id="r" * 60_000)]))


class DeafRouter(worker_pb2_grpc.MembershipServicer):
    """It welcomes every worker and reads nothing but its registration."""

    def __init__(self) -> None:
        self.num_streams = 0

    async def Attach(self, request_iterator: AsyncIterator[pb.WorkerMessage], context: Any) -> Any:  # noqa: N802
        """Be deaf until the worker gives up."""
        self.num_streams += 1
        await anext(request_iterator)
        yield pb.RouterMessage(welcome=pb.Welcome(session=str(self.num_streams)))
        await asyncio.Event().wait()


class LeavingRouter(worker_pb2_grpc.MembershipServicer):
    """It leaves its first worker at once. num_lost: how often each registration's worker had lost a router before."""

    def __init__(self, lost: list[None]) -> None:
        self._lost = lost
        self.num_lost: list[int] = []

    async def Attach(self, request_iterator: AsyncIterator[pb.WorkerMessage], context: Any) -> Any:  # noqa: N802
        """Keep the second one."""
        await anext(request_iterator)
        self.num_lost.append(len(self._lost))
        yield pb.RouterMessage(welcome=pb.Welcome(session=str(len(self.num_lost))))
        if len(self.num_lost) > 1:
            await asyncio.Event().wait()


@asynccontextmanager
async def linked(
    router: worker_pb2_grpc.MembershipServicer, on_lost: Callable[[], Awaitable[None]]
) -> AsyncIterator[RouterLink]:
    """A link that runs, to a router that serves."""
    server = grpc.aio.server(options=internal_server_options(3.0))
    worker_pb2_grpc.add_MembershipServicer_to_server(router, server)
    address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', router_tls(SECRET).server_credentials)}"
    await server.start()
    link = RouterLink(
        address,
        worker_tls(SECRET, "w", "b"),
        pb.Registration(),
        pb.Credit(),
        on_lost,
        3.0,
        max_unread_bytes=2**20,
    )
    run = asyncio.create_task(link.run())
    try:
        async with asyncio.timeout(20):
            yield link
    finally:
        run.cancel()
        await asyncio.wait([run])
        await server.stop(None)


async def test_a_router_that_reads_nothing_is_lost() -> None:
    """Else what is said to it would fill the worker's memory; so it aborts its requests and registers again."""
    lost = asyncio.Event()

    async def on_lost() -> None:
        lost.set()

    async with linked(DeafRouter(), on_lost) as link:
        await link.wait_attached()
        for _ in range(2000):
            if lost.is_set():
                break
            link.send(STEP)
            await asyncio.sleep(0)
        await lost.wait()
        await link.wait_attached()
        assert link.session == "2"
        assert link.num_unread_bytes < 2**20


async def test_the_requests_of_a_lost_router_are_aborted_before_the_next_registration() -> None:
    """Law 5: its next one knows nothing of them, or has begun them elsewhere."""
    lost: list[None] = []

    async def on_lost() -> None:
        lost.append(None)

    router = LeavingRouter(lost)
    async with linked(router, on_lost) as link:
        while link.session != "2":
            await asyncio.sleep(0.005)
        assert router.num_lost == [0, 1]


class TakenRouter(worker_pb2_grpc.MembershipServicer):
    """It keeps its workers, and notes what each stream begins with."""

    def __init__(self) -> None:
        self.registered = asyncio.Queue[str]()

    async def Attach(self, request_iterator: AsyncIterator[pb.WorkerMessage], context: Any) -> Any:  # noqa: N802
        """Welcome everybody."""
        first = await anext(request_iterator)
        self.registered.put_nowait(first.registration.worker_id)
        yield pb.RouterMessage(welcome=pb.Welcome(session="s"))
        await asyncio.Event().wait()


async def serving_at(
    address: str, router: worker_pb2_grpc.MembershipServicer, credentials: Any
) -> tuple[grpc.aio.Server, str]:
    server = grpc.aio.server(options=internal_server_options(3.0))
    worker_pb2_grpc.add_MembershipServicer_to_server(router, server)
    port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    await server.start()
    return server, f"127.0.0.1:{port}"


@pytest.mark.parametrize("rogue_secret", [None, "the secret of somebody else, 32 or more"])
async def test_whoever_takes_the_routers_port_while_it_is_away_gets_nothing(
    rogue_secret: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """H4: the proof was handed to whoever listened on the router's port, and was good for every worker."""
    caplog.set_level("INFO")
    true, rogue = TakenRouter(), TakenRouter()
    credentials = router_tls(SECRET).server_credentials
    server, address = await serving_at("127.0.0.1:0", true, credentials)
    lost = asyncio.Queue[None]()

    async def on_lost() -> None:
        lost.put_nowait(None)

    registration = pb.Registration(worker_id="w", boot_id="b")
    link = RouterLink(address, worker_tls(SECRET, "w", "b"), registration, pb.Credit(), on_lost, 3.0)
    run = asyncio.create_task(link.run())
    try:
        async with asyncio.timeout(40):
            assert await true.registered.get() == "w"
            while not link.is_attached:
                await asyncio.sleep(0.01)
            await server.stop(None)
            await lost.get()
            theirs = router_tls(rogue_secret).server_credentials if rogue_secret else None
            server, _ = await serving_at(address, rogue, theirs)
            while sum("not reachable yet" in record.message for record in caplog.records) < 2:
                await asyncio.sleep(0.05)
            await server.stop(None)
            server, _ = await serving_at(address, true, credentials)
            assert await true.registered.get() == "w"
            assert rogue.registered.empty()
    finally:
        run.cancel()
        await asyncio.wait([run])
        await server.stop(None)


async def test_a_worker_whose_router_never_proved_itself_ends_and_says_why() -> None:
    """H4: a wrong secret, or another program at the router's address, is no reason to try for ever."""
    rogue = TakenRouter()
    server, address = await serving_at("127.0.0.1:0", rogue, None)

    async def on_lost() -> None:
        raise AssertionError("it was never attached")

    link = RouterLink(address, worker_tls(SECRET, "w", "b"), pb.Registration(), pb.Credit(), on_lost, 3.0)
    try:
        with pytest.raises(IncompatiblePeerError, match="does not prove that it holds"):
            async with asyncio.timeout(20):
                await link.run()
        assert rogue.registered.empty()
    finally:
        await server.stop(None)
