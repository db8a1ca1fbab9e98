"""Limits of the resources that an HTTP client can use, over real sockets."""

import asyncio
import errno
import socket
from pathlib import Path

import pytest
import trustme

from serving.http_acceptor import listen
from serving.http_connections import HttpLimits
from serving.penalties import ALLOWANCE_SECONDS, HANDSHAKE_SECONDS, OPENING_SECONDS, Penalties
from serving.tls import read_tls
from tests.certificates import write_certificate
from tests.serving.closed_penalties import Closed
from tests.serving.http_clients import BIG, GET, Pages, serving

PATIENT = 60.0


@pytest.mark.parametrize(
    "sent", [b"", b"G", b"GET / HTTP/1.1\r\n", GET[:-2], b"\r\n", b"\x16\x03\x01"], ids=repr
)
async def test_a_connection_without_complete_headers_is_closed(sent: bytes) -> None:
    """H7: silent and half-sent connections live no longer than the header time-out."""
    limits = HttpLimits(header_seconds=0.2, idle_seconds=PATIENT)
    async with serving(Pages(), limits) as door:
        client = await door.connect(sent)
        await client.ended()
        await door.until_empty()


async def test_the_system_looks_for_clients_that_have_vanished() -> None:
    """A connection inherits keep-alive from the listening socket: nothing sets it for each one."""
    (listening,) = await listen("127.0.0.1", 0)
    with listening, socket.create_connection(listening.getsockname()):
        listening.setblocking(True)
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


async def test_headers_that_come_byte_by_byte_do_not_prolong_their_time() -> None:
    """H7: slow-loris."""
    async with serving(Pages(), HttpLimits(header_seconds=0.3, idle_seconds=PATIENT)) as door:
        client = await door.connect()
        ended = asyncio.create_task(client.ended())
        while not ended.done():
            client.send(b"X")
            await asyncio.wait({ended}, timeout=0.01)
        await door.until_empty()


async def test_headers_between_requests_are_timed_as_well() -> None:
    """H7: the second request of a connection has the same time as the first."""
    async with serving(Pages(), HttpLimits(header_seconds=0.3, idle_seconds=PATIENT)) as door:
        client = await door.connect(GET)
        assert b" 200 " in await client.read_head()
        assert await client.read_exactly(5) == b"hello"
        client.send(GET[:10])
        assert await client.ended() == b""


async def test_an_idle_connection_is_closed() -> None:
    """H7: an idle client is disconnected after its answer."""
    async with serving(Pages(), HttpLimits(header_seconds=PATIENT, idle_seconds=0.2)) as door:
        client = await door.connect(GET)
        assert (await client.ended()).endswith(b"hello")
        await door.until_empty()


async def test_header_bytes_are_bounded() -> None:
    """H7: headers of many megabytes are not collected."""
    async with serving(Pages(), HttpLimits(header_seconds=PATIENT, max_header_bytes=20_000)) as door:
        client = await door.connect(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
        for number in range(10):
            client.send(f"X-{number}: ".encode() + b"x" * 4000 + b"\r\n")
        await client.ended()
        await door.until_empty()


async def test_silent_connections_are_evicted_to_new_ones() -> None:
    """H7: a service whose places are all taken by silent clients still answers, each time."""
    limits = HttpLimits(max_connections=8, header_seconds=PATIENT, idle_seconds=PATIENT)
    async with serving(Pages(), limits) as door:
        for _ in range(40):
            await door.connect()
        for _ in range(20):
            client = await door.connect(GET)
            assert b" 200 " in await client.read_head()
            assert door.num_open <= 8
            door.server.connections.check_integrity()


async def test_half_sent_bodies_are_evicted_to_new_connections() -> None:
    """H7: a request without its body is evicted like a silent connection."""
    limits = HttpLimits(max_connections=4, header_seconds=PATIENT, idle_seconds=PATIENT)
    async with serving(Pages(), limits) as door:
        for _ in range(8):
            client = await door.connect(
                b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nhalf"
            )
        client = await door.connect(GET)
        assert b" 200 " in await client.read_head()


async def test_where_every_client_is_being_answered_new_ones_wait() -> None:
    """P2: connections above the cap are not refused; they are answered as soon as there is room."""
    pages = Pages()
    async with serving(pages, HttpLimits(max_connections=4)) as door:
        clients = [await door.connect() for _ in range(12)]
        for client in clients:
            client.send(GET.replace(b"/", b"/slow", 1))
        while pages.num_slow < 4:
            await asyncio.sleep(0.01)
        assert (pages.num_slow, door.num_open) == (4, 4)
        pages.release.set()
        for client in clients:
            assert b" 200 " in await client.read_head()
        assert pages.num_slow == 12


async def test_one_address_has_a_limit_of_its_own() -> None:
    """H7: above the limit a connection is answered 503, unless another one of the address is waiting."""
    pages = Pages()
    async with serving(pages, HttpLimits(max_connections=100, max_per_address=2)) as door:
        busy = [await door.connect() for _ in range(2)]
        for client in busy:
            client.send(GET.replace(b"/", b"/slow", 1))
        while pages.num_slow < 2:
            await asyncio.sleep(0.01)
        third = await door.connect()
        assert b" 503 " in await third.ended()
        pages.release.set()
        for client in busy:
            assert b" 200 " in await client.read_head()


async def test_a_whole_answer_that_is_not_read_is_dropped() -> None:
    """P7: it leaves the process after the stall time, as a streamed one does."""
    async with serving(Pages(), HttpLimits(stall_seconds=0.3, idle_seconds=PATIENT)) as door:
        client = await door.connect(GET.replace(b"/", b"/big", 1))
        assert b" 200 " in await client.read_head()
        await door.until_empty()


async def test_a_whole_answer_that_is_read_slowly_arrives() -> None:
    """P7: the stall time counts from the last byte that was taken, not from the answer's beginning."""
    async with serving(Pages(), HttpLimits(stall_seconds=0.5, idle_seconds=PATIENT)) as door:
        client = await door.connect(GET.replace(b"/", b"/big", 1))
        await client.read_head()
        for _ in range(16):
            await client.read_exactly(BIG // 16)
            await asyncio.sleep(0.1)


async def test_the_end_of_an_answer_that_is_not_read_is_dropped_too() -> None:
    """P7: an answer small enough for the process's own buffer does not stay there."""
    pages = Pages()
    async with serving(pages, HttpLimits(stall_seconds=0.3, idle_seconds=PATIENT)) as door:
        client = await door.connect(
            GET.replace(b"/", b"/big", 1).replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        )
        await client.read_head()
        await door.until_empty()


async def test_a_half_finished_tls_handshake_ends(tmp_path: Path) -> None:
    """H7: a client that opens TLS and sends nothing holds its place for the header time-out only."""
    tls = read_tls(*write_certificate(trustme.CA(), tmp_path, "localhost"))
    assert tls is not None
    limits = HttpLimits(header_seconds=0.2)
    async with serving(Pages(), limits, tls.context) as door:
        for sent in (b"", b"\x16\x03\x01\x02\x00\x01\x00"):
            client = await door.connect(sent)
            await client.ended()
            await door.until_empty()


async def test_silent_tls_handshakes_are_evicted(tmp_path: Path) -> None:
    """H7: a silent client is evicted before the handshake as well."""
    tls = read_tls(*write_certificate(trustme.CA(), tmp_path, "localhost"))
    assert tls is not None
    limits = HttpLimits(max_connections=2, header_seconds=PATIENT)
    async with serving(Pages(), limits, tls.context) as door:
        silent = [await door.connect() for _ in range(4)]
        await silent[0].ended()
        await silent[1].ended()
        assert door.num_open == 2


@pytest.mark.parametrize(
    "line", [b"GET /\x00 HTTP/1.1", b"Authorization: Bearer sk-not-to-be-told", b"GET / HTTP/9.9"]
)
async def test_what_is_no_http_is_answered_without_its_bytes(
    line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """L4: a key in an invalid line is quoted neither in the answer nor in the log."""
    async with serving(Pages(), HttpLimits()) as door:
        client = await door.connect(line + b"\r\nAuthorization: Bearer sk-not-to-be-told\r\n\x00: y\r\n\r\n")
        answer = await client.ended()
    assert b" 400 " in answer
    assert b"sk-not-to-be-told" not in answer
    assert "sk-not-to-be-told" not in caplog.text


async def test_a_process_without_descriptors_waits_for_one(caplog: pytest.LogCaptureFixture) -> None:
    """P3: an accept without a free descriptor writes one log line, and is retried."""
    async with serving(Pages(), HttpLimits()) as door:
        first = await door.connect(GET)
        assert b" 200 " in await first.read_head()
        full = _Full()
        door.server.acceptor.accept_from(full)
        assert full.num_calls == 1
        assert caplog.text.count("no connection can be accepted") == 1
        second = await door.connect(GET)
        await first.close()
        assert b" 200 " in await second.read_head()


class _Full:
    """A listening socket of a process without a free descriptor."""

    def __init__(self) -> None:
        self.num_calls = 0

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        self.num_calls += 1
        raise OSError(errno.EMFILE, "Too many open files")


async def test_a_connection_without_a_request_is_wasted_time() -> None:
    """Its address waits when it has wasted much; one that sends requests does not."""
    penalties = Penalties(lambda: 100.0)
    number = int(ALLOWANCE_SECONDS / OPENING_SECONDS) + 1
    async with serving(Pages(), HttpLimits(), penalties=penalties) as door:
        for _ in range(number):
            client = await door.connect(GET)
            await client.read_head()
            await client.close()
        await door.until_empty()
        assert not penalties.is_due("127.0.0.1")
        for sent in [b"", b"no HTTP\r\n\r\n"] * (number // 2 + 1):
            client = await door.connect(sent)
            await client.close()
        await door.until_empty()
        assert penalties.is_due("127.0.0.1")


async def test_a_connection_of_a_wasteful_address_waits_for_its_turn() -> None:
    penalties = Closed("127.0.0.1")
    async with serving(Pages(), HttpLimits(), penalties=penalties) as door:
        client = await door.connect(GET)
        head = asyncio.create_task(client.read_head())
        await penalties.has_waiter.wait()
        assert not head.done()
        penalties.is_open.set()
        assert b" 200 " in await head


async def test_a_handshake_that_fails_is_wasted_time(tmp_path: Path) -> None:
    """It wastes more time than a connection without TLS."""
    penalties = Penalties(lambda: 100.0, has_tls=True)
    tls = read_tls(*write_certificate(trustme.CA(), tmp_path, "localhost"))
    assert tls
    async with serving(Pages(), HttpLimits(), tls.context, penalties) as door:
        for _ in range(int(ALLOWANCE_SECONDS / HANDSHAKE_SECONDS) + 1):
            client = await door.connect(GET)
            await client.ended()
        await door.until_empty()
        assert penalties.is_due("127.0.0.1")
