"""Limits of the resources that a gRPC client can use, before and after its message has arrived."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from serving.api_keys import ApiKeys, WrongKeys
from serving.errors import address_of_peer
from serving.grpc_messages import ApiKeyInterceptor, MessageInterceptor

BIG = 8 * 2**20
KEYED = (("authorization", "Bearer sk-right"),)


class Echo:
    """A service of two methods that answer eight megabytes, or their message."""

    def __init__(self) -> None:
        self.address = ""
        self.num_begun = 0
        self.ended = asyncio.Event()

    async def big(self, _: bytes, context: Any) -> bytes:
        """Answer more than any window."""
        self.num_begun += 1
        context.add_done_callback(lambda _: self.ended.set())
        return bytes(BIG)

    async def echo(self, request: bytes, _: Any) -> bytes:
        """Answer the message."""
        self.num_begun += 1
        return request

    def handler(self) -> grpc.GenericRpcHandler:
        """Return both methods, for a server."""
        methods: dict[str, Any] = {
            "Big": grpc.unary_unary_rpc_method_handler(self.big, bytes, bytes),
            "Echo": grpc.unary_unary_rpc_method_handler(self.echo, bytes, bytes),
        }
        return grpc.method_handlers_generic_handler("test.Echo", methods)


@asynccontextmanager
async def serving(service: "Echo | Watch", **bounds: Any) -> AsyncIterator[grpc.aio.Channel]:
    """Run a server that requires a key, and open a channel to it."""
    server = grpc.aio.server(
        interceptors=[
            ApiKeyInterceptor(ApiKeys("sk-right"), WrongKeys().note),
            MessageInterceptor("test.Echo", **bounds),
        ]
    )
    server.add_generic_rpc_handlers((service.handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    service.address = f"127.0.0.1:{port}"
    await server.start()
    options = [("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        yield channel
    await server.stop(None)


def half_sent(channel: grpc.aio.Channel, method: str, metadata: Any = None) -> Any:
    """Start a call whose message is never sent."""
    return channel.stream_stream(f"/test.Echo/{method}")(metadata=metadata)


async def test_a_call_without_a_key_ends_before_its_message_is_there() -> None:
    """M4: the message of an unauthenticated client is neither awaited nor kept."""
    service = Echo()
    async with serving(service) as channel:
        for _ in range(40):
            call = half_sent(channel, "Echo")
            async with asyncio.timeout(20):
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
    assert service.num_begun == 0


async def test_messages_that_do_not_come_end_their_calls() -> None:
    """M4: the number of messages received at once is limited, and the time of each."""
    service = Echo()
    async with serving(service, max_reads=2, read_seconds=0.3) as channel:
        calls = [half_sent(channel, "Echo", KEYED) for _ in range(6)]
        async with asyncio.timeout(20):
            assert {await call.code() for call in calls} == {grpc.StatusCode.DEADLINE_EXCEEDED}
        assert service.num_begun == 0
        echo: Any = channel.unary_unary("/test.Echo/Echo")
        assert await echo(b"hello", metadata=KEYED) == b"hello"


async def test_a_connection_of_silent_calls_keeps_no_other_out() -> None:
    """H5, M4: calls without a message could hold all places for a minute, again and again."""
    service = Echo()
    async with serving(service, max_reads=4, read_seconds=600) as silent:
        calls = [half_sent(silent, "Echo", KEYED) for _ in range(100)]
        await calls[0].wait_for_connection()
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(service.address, options=options) as other:
            echo: Any = other.unary_unary("/test.Echo/Echo")
            async with asyncio.timeout(20):
                assert await echo(b"hello", metadata=KEYED) == b"hello"
        for call in calls:
            call.cancel()


class Watch:
    """A service that needs no key, whose calls last until their client ends them."""

    def __init__(self) -> None:
        self.address = ""
        self.num_open = self.num_ended = 0

    async def watch(self, _: bytes, context: Any) -> None:
        """Send one response and then nothing."""
        self.num_open += 1
        try:
            await context.write(b"here")
            await asyncio.Event().wait()
        finally:
            self.num_open -= 1
            self.num_ended += 1

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the service, for a server."""
        method: Any = grpc.unary_stream_rpc_method_handler(self.watch, bytes, bytes)
        return grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Watch": method})


def watch_on(channel: grpc.aio.Channel) -> Any:
    """Start another watch."""
    method: Any = channel.unary_stream("/grpc.health.v1.Health/Watch")
    return method(b"")


async def test_streams_that_need_no_key_are_bounded() -> None:
    """H7: an unauthenticated client could hold 128 health watches per connection without a time limit."""
    service = Watch()
    async with serving(service, max_reads=8) as channel:
        watches = [watch_on(channel) for _ in range(120)]
        assert await watches[0].read() == b"here"
        others = []
        for _ in range(4):
            options = [("grpc.use_local_subchannel_pool", 1)]
            one = grpc.aio.insecure_channel(service.address, options=options)
            others.append(one)
            watches += [watch_on(one) for _ in range(120)]
        async with asyncio.timeout(30):
            # What was ended has a message that its client has not read; at most eight wait.
            while sum(watch.done() for watch in watches) + service.num_open + service.num_ended < 592:
                await asyncio.sleep(0.05)
        assert 0 < service.num_open <= 256
        refused = [watch for watch in watches if watch.done()]
        assert {await watch.code() for watch in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        for one in others:
            await one.close()


async def test_a_whole_answer_that_is_not_taken_ends() -> None:
    """P7: as over HTTP, the answer of a client that reads nothing is dropped."""
    service = Echo()
    async with serving(service, stall_seconds=0.3) as channel:
        call = half_sent(channel, "Big", KEYED)
        await call.write(b"x")
        async with asyncio.timeout(20):
            await service.ended.wait()
        call.cancel()


async def test_a_whole_answer_arrives_as_from_any_server() -> None:
    """P7: a client of a method with one answer sees no difference."""
    async with serving(Echo()) as channel:
        big: Any = channel.unary_unary("/test.Echo/Big")
        assert len(await big(b"x", metadata=KEYED)) == BIG


@pytest.mark.parametrize(
    ("peer", "address"),
    [("ipv4:127.0.0.1:50000", "127.0.0.1"), ("ipv6:%5B::1%5D:50000", "::1"), ("unix:x", "unix:x")],
)
def test_a_peer_has_an_address(peer: str, address: str) -> None:
    assert address_of_peer(peer) == address
