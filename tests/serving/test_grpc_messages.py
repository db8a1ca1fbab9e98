"""What a gRPC client can make a server hold before, and after, its message is there."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from serving.api_keys import ApiKeys
from serving.grpc_errors import address_of_peer
from serving.grpc_keys import ApiKeyInterceptor
from serving.grpc_messages import MessageInterceptor
from serving.wrong_keys import WrongKeys

BIG = 8 * 2**20
KEYED = (("authorization", "Bearer sk-right"),)


class Echo:
    """A service of two methods that answer eight megabytes, or what they got."""

    def __init__(self) -> None:
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
        """Both, for a server."""
        methods: dict[str, Any] = {
            "Big": grpc.unary_unary_rpc_method_handler(self.big, bytes, bytes),
            "Echo": grpc.unary_unary_rpc_method_handler(self.echo, bytes, bytes),
        }
        return grpc.method_handlers_generic_handler("test.Echo", methods)


@asynccontextmanager
async def serving(service: Echo, **bounds: Any) -> AsyncIterator[grpc.aio.Channel]:
    """A server that wants a key, and a channel to it."""
    server = grpc.aio.server(
        interceptors=[
            ApiKeyInterceptor(ApiKeys("sk-right"), WrongKeys()),
            MessageInterceptor("test.Echo", **bounds),
        ]
    )
    server.add_generic_rpc_handlers((service.handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    options = [("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        yield channel
    await server.stop(None)


def half_sent(channel: grpc.aio.Channel, method: str, metadata: Any = None) -> Any:
    """A call whose message does not come."""
    return channel.stream_stream(f"/test.Echo/{method}")(metadata=metadata)


async def test_a_call_without_a_key_ends_before_its_message_is_there() -> None:
    """M4: nothing of a stranger's message is waited for, or kept."""
    service = Echo()
    async with serving(service) as channel:
        for _ in range(40):
            call = half_sent(channel, "Echo")
            async with asyncio.timeout(20):
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
    assert service.num_begun == 0


async def test_messages_that_do_not_come_end_their_calls() -> None:
    """M4: so many messages are received at once, each for so long."""
    service = Echo()
    async with serving(service, max_reads=2, read_seconds=0.3) as channel:
        calls = [half_sent(channel, "Echo", KEYED) for _ in range(6)]
        async with asyncio.timeout(20):
            assert {await call.code() for call in calls} == {grpc.StatusCode.DEADLINE_EXCEEDED}
        assert service.num_begun == 0
        echo: Any = channel.unary_unary("/test.Echo/Echo")
        assert await echo(b"hello", metadata=KEYED) == b"hello"


async def test_a_whole_answer_that_is_not_taken_ends() -> None:
    """P7: over gRPC as over HTTP, a client that reads nothing does not keep an answer in the process."""
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
