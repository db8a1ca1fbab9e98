"""The front of a public gRPC port: hostile connections end, and clients notice nothing of it."""

import asyncio
import random
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import trustme

from serving.errors import address_of_peer
from serving.http2_frames import PREFACE, Code, Kind
from serving.http2_limits import MAX_BLOCK_BYTES
from serving.http_connections import HttpLimits
from serving.tls import read_tls
from tests.certificates import write_certificate
from tests.http2 import ENDLESS, HELLO, endless, frame, literal, new_headers, opened
from tests.serving.grpc_door import ALONE, LARGE, PATIENT, Door, echo, serving


def code_of(received: bytes) -> int:
    """Return the code of the GOAWAY at the end of what a client received."""
    at = received.rindex(bytes((Kind.GOAWAY, 0, 0, 0, 0, 0))) + 6
    return int.from_bytes(received[at + 4 : at + 8])


async def attack(door: Door, name: str) -> int:
    """Send frames of one kind until the connection ends; return the number of bytes."""
    reader, writer = await door.connect()
    num_bytes = 0
    drained = asyncio.create_task(reader.read(-1))
    try:
        async with asyncio.timeout(30):
            writer.write(HELLO)
            for data in endless(name):
                writer.write(data)
                num_bytes += len(data)
                await writer.drain()
                await asyncio.sleep(0)
                if drained.done():
                    break
    except ConnectionError:
        pass
    finally:
        writer.transport.abort()
        drained.cancel()
        await asyncio.wait({drained})
        drained.cancelled() or drained.exception()
    return num_bytes


@pytest.mark.parametrize("name", ENDLESS)
async def test_frames_without_end_end_the_connection(name: str) -> None:
    async with serving(HttpLimits(header_seconds=PATIENT)) as door:
        await attack(door, name)
        await door.check()


async def test_the_client_is_told_and_the_log_names_it(caplog: pytest.LogCaptureFixture) -> None:
    block = [frame(Kind.CONTINUATION, 0, 1, new_headers(2**14))] * 3
    async with serving(HttpLimits(header_seconds=PATIENT)) as door:
        received = await door.end_of(HELLO, opened(1, 0), *block)
        assert code_of(received) == Code.ENHANCE_YOUR_CALM
        assert f"more than {MAX_BLOCK_BYTES} bytes".encode() in received
    assert (
        f"closed a gRPC connection of 127.0.0.1: a header block has more than {MAX_BLOCK_BYTES}"
        in caplog.text
    )


@pytest.mark.parametrize("begin", [b"", PREFACE[:10], PREFACE, HELLO + opened(1, 0), HELLO + opened(1)[:-20]])
async def test_headers_that_are_not_complete_end_in_time(begin: bytes) -> None:
    async with serving(HttpLimits(header_seconds=0.3)) as door:
        received = await door.end_of(begin)
        assert b"headers were not complete after 0.3 s" in received
        await door.check()


async def test_a_connection_between_calls_has_no_deadline_for_headers() -> None:
    async with (
        serving(HttpLimits(header_seconds=0.2)) as door,
        grpc.aio.insecure_channel(door.address, options=[ALONE]) as channel,
    ):
        await echo(channel)(b"1")
        await asyncio.sleep(0.5)
        await echo(channel)(b"2")
        first, second = door.peers
        assert first == second


async def test_an_address_has_its_number_of_connections() -> None:
    limits = HttpLimits(max_connections=100, max_per_address=2, header_seconds=PATIENT)
    async with serving(limits) as door, grpc.aio.insecure_channel(door.address, options=[ALONE]) as channel:
        call: Any = channel.stream_stream("/test.Echo/Hold")()
        assert await call.read() == b"held"
        other: Any = channel.stream_stream("/test.Echo/Hold")()
        _, silent = await door.connect()  # it is closed for the next one, since it has no call
        await asyncio.sleep(0.3)
        assert len(door.front.connections) == 2
        async with grpc.aio.insecure_channel(door.address, options=[ALONE]) as second:
            held: Any = second.stream_stream("/test.Echo/Hold")()
            assert await held.read() == b"held"
            assert len(door.front.connections) == 2
            door.front.connections.check_integrity()
            assert await door.end_of(HELLO) == b""
            assert await other.read() == b"held"
        silent.transport.abort()


async def test_silent_connections_make_room_for_a_client() -> None:
    limits = HttpLimits(max_connections=4, header_seconds=PATIENT)
    async with serving(limits) as door:
        silent = [(await door.connect())[1] for _ in range(8)]
        await door.check()
        assert len(door.front.connections) <= 4
        for writer in silent:
            writer.transport.abort()


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_the_client_s_address_is_known_behind_the_front(host: str) -> None:
    async with serving(HttpLimits(), address=f"{host}:0") as door:
        await door.check()
        await door.check()
        first, second = door.peers
        assert address_of_peer(first) == address_of_peer(second) == host.strip("[]")
        assert first != second


@pytest.mark.parametrize("has_tls", [False, True])
async def test_a_client_notices_nothing(has_tls: bool, tmp_path: Path) -> None:
    """Large metadata, large messages, long streams and many calls at once."""
    authority = trustme.CA()
    tls = read_tls(*write_certificate(authority, tmp_path, "127.0.0.1")) if has_tls else None
    options: list[Any] = [
        ALONE,
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
    ]
    options += [("grpc.max_metadata_size", 2**20), ("grpc.absolute_max_metadata_size", 2**20)]
    trusting = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    async with serving(HttpLimits(header_seconds=PATIENT), tls.grpc_context if tls else None) as door:
        channel = (
            grpc.aio.secure_channel(door.address, trusting, options)
            if has_tls
            else grpc.aio.insecure_channel(door.address, options)
        )
        async with channel:
            call = echo(channel)(b"a", metadata=[(f"x-{n}", "v" * 1500) for n in range(9)])
            assert sum(len(value) for _, value in await call.initial_metadata()) >= 9 * 1500
            with pytest.raises(grpc.aio.AioRpcError) as too_large:
                await echo(channel)(b"a", metadata=[("x-1", "v" * 20_000)])
            assert too_large.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            message = random.Random(1).randbytes(LARGE)
            assert await echo(channel)(message) == message
            count: Any = channel.unary_stream("/test.Echo/Count")
            received = [[int(n) async for n in count(b"2000 1")] for _ in range(10)]
            assert received == [list(range(2000))] * 10
            both = await asyncio.gather(*(echo(channel)(str(n).encode()) for n in range(100)))
            assert both == [str(n).encode() for n in range(100)]
            cancelled = [count(b"1000000 1") for _ in range(100)]
            for stream in cancelled:
                await stream.read()
                stream.cancel()
            assert await echo(channel)(b"b") == b"b"
        assert len(set(door.peers)) == 1


async def test_a_client_that_does_not_read_is_not_read_for() -> None:
    """The answers wait in gRPC's server, whose methods write no more: the front keeps no more than its buffers."""
    path = literal(b":path", b"/test.Echo/Count")
    head = b"\x83\x86" + path + literal(b":authority", b"a") + literal(b"content-type", b"application/grpc")
    head += literal(b"te", b"trailers")
    window = frame(Kind.SETTINGS, 0, 0, b"\x00\x04\x7f\xff\xff\xff")
    window += frame(Kind.WINDOW_UPDATE, 0, 0, (2**31 - 1 - 65535).to_bytes(4))
    call = frame(Kind.HEADERS, 4, 1, head) + frame(Kind.DATA, 1, 1, b"\x00\x00\x00\x00\x0a" + b"9999 10000")
    async with serving(HttpLimits(header_seconds=PATIENT)) as door:
        reader, writer = await door.connect()
        writer.write(HELLO + window + call)
        await reader.readexactly(100)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        counts = [door.num_counted]
        while len(counts) < 2 or counts[-1] > counts[-2]:
            await asyncio.sleep(0.5)
            counts.append(door.num_counted)
        assert 0 < counts[-1] < 5000
        writer.transport.abort()


async def test_a_half_finished_tls_handshake_ends(tmp_path: Path) -> None:
    tls = read_tls(*write_certificate(trustme.CA(), tmp_path, "localhost"))
    assert tls is not None
    async with serving(HttpLimits(header_seconds=0.3), tls.grpc_context) as door:
        assert await door.end_of(b"\x16\x03\x01\x01\x00") == b""
        await door.end_of(b"x" * 10_000)
        assert not len(door.front.connections)


async def test_closing_ends_connections_and_removes_the_socket() -> None:
    async with serving(HttpLimits()) as door:
        _, writer = await door.connect()
        folder = Path(door.front.inner_address.removeprefix("unix:")).parent
        assert folder.stat().st_mode & 0o777 == 0o700
        assert [entry.is_socket() for entry in folder.iterdir()] == [True]
    assert not folder.exists()
    with pytest.raises(OSError):
        socket.create_connection(tuple(door.address.split(":")), timeout=5)  # type: ignore[arg-type]
    writer.transport.abort()


@pytest.mark.parametrize("seed", range(8))
async def test_random_frames_end_the_connection_or_are_served(seed: int) -> None:
    """Valid and broken frames, cut anywhere; a good client is served after each connection."""
    rng = random.Random(seed)
    async with serving(HttpLimits(header_seconds=0.2)) as door:
        for _ in range(12):
            data = b"".join(_random_frame(rng) for _ in range(rng.choice((3, 30, 3000))))
            data = rng.choice((HELLO, HELLO, HELLO, PREFACE, b"")) + data
            reader, writer = await door.connect()
            with suppress(OSError):
                while data:
                    size = rng.choice((1, 9, 100, 2**14, 2**20))
                    writer.write(data[:size])
                    data = data[size:]
                    await writer.drain()
                    await asyncio.sleep(0)
            writer.transport.abort()
            del reader
        await door.check()
        async with asyncio.timeout(20):
            while len(door.front.connections):
                await asyncio.sleep(0.05)
        door.front.connections.check_integrity()


def _random_frame(rng: random.Random) -> bytes:
    stream = rng.choice((0, 1, 1, 3, 5, rng.randrange(2**32)))
    match rng.randrange(8):
        case 0:
            return opened(stream | 1, rng.choice((0, 1, 4, 4, 4, 5)))
        case 1:
            return frame(Kind.DATA, rng.choice((0, 0, 1, 8)), stream, rng.randbytes(rng.choice((0, 5, 300))))
        case 2:
            return frame(Kind.PING, rng.choice((0, 1)), 0, bytes(8))
        case 3:
            return frame(Kind.SETTINGS, rng.choice((0, 1)), 0, b"\x00\x03\x00\x00\x00\x64" * rng.randrange(3))
        case 4:
            return frame(Kind.WINDOW_UPDATE, 0, stream, rng.randrange(1, 2**31).to_bytes(4))
        case 5:
            return frame(Kind.RST_STREAM, 0, stream, bytes(4))
        case 6:
            return rng.randbytes(rng.randrange(30))
        case _:
            return frame(rng.randrange(256), rng.randrange(256), stream, rng.randbytes(rng.randrange(200)))
