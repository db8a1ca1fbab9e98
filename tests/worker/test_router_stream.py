"""The worker's stream to a router that stalls, leaves, or is not its router."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from contract.errors import IncompatiblePeerError
from contract.membership import DrainOrder, RoleOrder
from protos import worker_pb2 as pb
from protos import worker_pb2_grpc
from serving.cluster_tls import router_tls, worker_tls
from serving.grpc_options import internal_server_options
from wire.messages import from_proto
from worker.router_stream import RouterAddress, RouterStream

SECRET = "a secret of the tests, of 32 or more characters"
STEP = pb.WorkerMessage(step=pb.StepOutput(entries=[pb.TokenEntry(request_id="r" * 60_000)]))


class Losses:
    """Records the sessions of streams that were lost."""

    def __init__(self) -> None:
        self.sessions: list[str] = []
        self.changed = asyncio.Event()

    def on_open(self, stream: RouterStream) -> None:
        """Ignore."""

    async def on_message(self, stream: RouterStream, message: pb.RouterMessage) -> None:
        """Ignore."""

    async def on_loss(self, session: str) -> None:
        """Record the session."""
        self.sessions.append(session)
        self.changed.set()


class StalledRouter(worker_pb2_grpc.MembershipServicer):
    """A router that accepts every worker and reads nothing but its registration."""

    def __init__(self) -> None:
        self.num_streams = 0

    async def Attach(self, request_iterator: AsyncIterator[pb.WorkerMessage], context: Any) -> Any:  # noqa: N802
        """Wait until the worker closes the stream."""
        self.num_streams += 1
        await anext(request_iterator)
        yield pb.RouterMessage(welcome=pb.Welcome(session=str(self.num_streams)))
        await asyncio.Event().wait()


class LeavingRouter(worker_pb2_grpc.MembershipServicer):
    """A router that leaves its first worker at once. num_lost: losses that each worker had seen when it registered."""

    def __init__(self, losses: Losses) -> None:
        self._losses = losses
        self.num_lost: list[int] = []

    async def Attach(self, request_iterator: AsyncIterator[pb.WorkerMessage], context: Any) -> Any:  # noqa: N802
        """Close the first stream and keep the second one."""
        await anext(request_iterator)
        self.num_lost.append(len(self._losses.sessions))
        yield pb.RouterMessage(welcome=pb.Welcome(session=str(len(self.num_lost))))
        if len(self.num_lost) > 1:
            await asyncio.Event().wait()


def ignore(_: pb.RouterMessage) -> None:
    """Do nothing."""


def address_of(address: str) -> RouterAddress:
    return RouterAddress(address, worker_tls(SECRET, "w", "b"), 3.0)


@asynccontextmanager
async def streaming(
    router: worker_pb2_grpc.MembershipServicer, losses: Losses
) -> AsyncIterator[RouterStream]:
    """Run a stream to a router that serves."""
    server = grpc.aio.server(options=internal_server_options(3.0))
    worker_pb2_grpc.add_MembershipServicer_to_server(router, server)
    address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', router_tls(SECRET).server_credentials)}"
    await server.start()
    stream = RouterStream(address_of(address), pb.Registration(), losses, max_unread_bytes=2**20)
    run = asyncio.create_task(stream.run())
    try:
        async with asyncio.timeout(20):
            yield stream
    finally:
        run.cancel()
        await asyncio.wait([run])
        await server.stop(None)


async def test_a_router_that_reads_nothing_is_lost() -> None:
    """Else unread messages would fill the worker's memory; it aborts its requests and registers again."""
    losses = Losses()
    async with streaming(StalledRouter(), losses) as stream:
        await stream.wait_attached()
        for _ in range(2000):
            if losses.sessions:
                break
            stream.send(STEP)
            await asyncio.sleep(0)
        await losses.changed.wait()
        assert losses.sessions == ["1"]
        await stream.wait_attached()
        assert stream.session == "2"
        assert stream.num_unread_bytes < 2**20


async def test_the_requests_of_a_lost_router_are_aborted_before_the_next_registration() -> None:
    """Law 5: the next router has no record of them, or has started them elsewhere."""
    losses = Losses()
    router = LeavingRouter(losses)
    async with streaming(router, losses) as stream:
        while stream.session != "2":
            await asyncio.sleep(0.005)
        assert router.num_lost == [0, 1]


class AbsurdRouter(worker_pb2_grpc.MembershipServicer):
    """A router whose messages have a number out of its range, until it has sent all of them."""

    def __init__(self, messages: list[pb.RouterMessage]) -> None:
        self._messages = messages

    async def Attach(self, request_iterator: AsyncIterator[pb.WorkerMessage], context: Any) -> Any:  # noqa: N802
        """Send the next one to each stream."""
        await anext(request_iterator)
        yield pb.RouterMessage(welcome=pb.Welcome(session=f"{len(self._messages)} left"))
        if self._messages:
            yield self._messages.pop(0)
        await asyncio.Event().wait()


class Obedient(Losses):
    """Carries out what concerns a worker itself, as a worker does."""

    async def on_message(self, stream: RouterStream, message: pb.RouterMessage) -> None:
        """Read the message."""
        match message.WhichOneof("message"):
            case "drain":
                from_proto(DrainOrder, message.drain)
            case "role_change":
                from_proto(RoleOrder, message.role_change)


async def test_a_bad_number_of_a_router_ends_its_stream_with_the_fields_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A4: and no more than that: the worker registers again."""
    losses = Obedient()
    router = AbsurdRouter(
        [
            pb.RouterMessage(drain=pb.Drain(deadline_seconds=math.nan)),
            pb.RouterMessage(role_change=pb.RoleChange(role="both", epoch=2**60)),
        ]
    )
    async with streaming(router, losses) as stream:
        while stream.session != "0 left":
            await asyncio.sleep(0.005)
    lines = [record.getMessage() for record in caplog.records if "lost router" in record.getMessage()]
    assert ["Drain.deadline_seconds is nan" in lines[0], "RoleChange.epoch is" in lines[1]] == [True, True]
    assert not any(record.exc_info for record in caplog.records)


class RecordingRouter(worker_pb2_grpc.MembershipServicer):
    """A router that keeps its workers and records their registrations."""

    def __init__(self) -> None:
        self.registered = asyncio.Queue[str]()

    async def Attach(self, request_iterator: AsyncIterator[pb.WorkerMessage], context: Any) -> Any:  # noqa: N802
        """Accept every worker."""
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
async def test_another_program_on_the_routers_port_receives_nothing(
    rogue_secret: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """H4: the worker's proof was sent to any listener on the router's port, and was valid for every worker."""
    caplog.set_level("DEBUG")
    true, rogue = RecordingRouter(), RecordingRouter()
    credentials = router_tls(SECRET).server_credentials
    server, address = await serving_at("127.0.0.1:0", true, credentials)
    losses = Losses()
    registration = pb.Registration(worker_id="w", boot_id="b")
    stream = RouterStream(address_of(address), registration, losses)
    run = asyncio.create_task(stream.run())
    try:
        async with asyncio.timeout(40):
            assert await true.registered.get() == "w"
            while not stream.is_attached:
                await asyncio.sleep(0.01)
            await server.stop(None)
            await losses.changed.wait()
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


async def test_a_worker_whose_router_was_never_authenticated_ends_with_the_reason() -> None:
    """H4: a wrong secret, or another program at the router's address, ends the worker instead of retrying for ever."""
    rogue = RecordingRouter()
    server, address = await serving_at("127.0.0.1:0", rogue, None)

    losses = Losses()
    stream = RouterStream(address_of(address), pb.Registration(), losses)
    try:
        with pytest.raises(IncompatiblePeerError, match="does not prove that it holds"):
            async with asyncio.timeout(20):
                await stream.run()
        assert rogue.registered.empty()
        assert losses.sessions == []
    finally:
        await server.stop(None)
