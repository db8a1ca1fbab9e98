"""Clients of a gRPC port that waste the event loop's time wait; see ``serving/penalties.py``."""

import asyncio

import pytest

from serving.http2_frames import FrameReader, Kind
from serving.http_connections import HttpLimits
from serving.penalties import ALLOWANCE_SECONDS, OPENING_SECONDS, Penalties
from tests.http2 import HELLO, frame, whole_call
from tests.serving.closed_penalties import Closed
from tests.serving.grpc_door import METHOD, PATIENT, serving


@pytest.mark.parametrize("is_open", [False, True])
async def test_an_address_that_has_wasted_much_waits_and_others_do_not(is_open: bool) -> None:
    """Both its new connections and what it sends on an open one wait for their turn."""
    bad = "127.0.0.66"
    penalties = Closed(bad)
    async with serving(HttpLimits(header_seconds=PATIENT), penalties=penalties) as door:
        host, _, port = door.address.rpartition(":")
        if is_open:
            penalties.is_open.set()
        reader, writer = await asyncio.open_connection(host, int(port), local_addr=(bad, 0))
        writer.write(HELLO)
        if is_open:
            async with asyncio.timeout(20):
                assert await reader.readexactly(9)  # the server's SETTINGS
            penalties.is_open.clear()
        try:
            writer.write(whole_call(1, METHOD.encode()))
            await door.check()
            assert not any(bad in peer for peer in door.peers)
            penalties.is_open.set()
            async with asyncio.timeout(60):
                while not any(bad in peer for peer in door.peers):
                    assert await reader.read(2**16)
        finally:
            writer.transport.abort()


async def test_a_useful_connection_that_breaks_a_rule_is_wasted_time() -> None:
    penalties = Penalties(lambda: 100.0)  # no time passes for it
    penalties.note("127.0.0.1", ALLOWANCE_SECONDS)
    kinds: list[int] = []

    def on_frame(kind: int, _flags: int, _stream: int, _length: int) -> bool:
        kinds.append(kind)
        return False

    answer = FrameReader(on_frame)
    async with serving(HttpLimits(header_seconds=PATIENT), penalties=penalties) as door:
        reader, writer = await door.connect()
        writer.write(HELLO + whole_call(1, METHOD.encode()))
        async with asyncio.timeout(60):
            while kinds.count(Kind.HEADERS) < 2:
                answer.feed(await reader.read(2**16))
            assert not penalties.is_due("127.0.0.1")
            writer.write(frame(Kind.PING, 0, 0, bytes(8)) * 1000)
            await reader.read(-1)
        writer.transport.abort()
    assert penalties.is_due("127.0.0.1")


async def test_connections_without_an_accepted_call_are_wasted_time() -> None:
    penalties = Penalties(lambda: 100.0)  # no time passes for it
    async with serving(HttpLimits(header_seconds=PATIENT), penalties=penalties) as door:
        for _ in range(int(ALLOWANCE_SECONDS / OPENING_SECONDS)):
            await door.check()
        assert not penalties.is_due("127.0.0.1")
        for _ in range(int(ALLOWANCE_SECONDS / OPENING_SECONDS)):
            _, writer = await door.connect()
            writer.transport.abort()
        await door.end_of(b"no HTTP/2")  # the others have ended by then
        assert penalties.is_due("127.0.0.1")
