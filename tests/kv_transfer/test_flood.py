"""A flood of connections on the control and the data port: an honest peer gets in at its first try."""

import selectors
import socket
import threading
import time
from collections import Counter
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.links.framing import encode_frame, parse_address, read_frame, write_frame
from kv_transfer.links.listening import MAX_UNAUTHENTICATED, Listener, LogLimiter, choose_displaced, listen_on
from kv_transfer.protocol.reads import Read, Source
from kv_transfer.transports.data_handshake import (
    MAX_DATA_FRAME_BYTES,
    DataChallenge,
    DataReply,
    DataStatus,
    ReaderProofs,
)
from kv_transfer.transports.tcp.transport import TcpReceiver
from tests.kv_transfer.builders import hand_over, pair_of
from tests.kv_transfer.test_unauthenticated import WAIT, data_port, silent_links
from tests.leftovers import Leftovers


def test_a_flood_of_silent_connections_costs_an_honest_peer_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """L7: a flood of the control port delayed the first hand-over: the honest peer was displaced, and dialed again."""
    with pair_of() as pair, ExitStack() as stack:
        flooding, stop = threading.Event(), threading.Event()
        opened: list[socket.socket] = []

        def flood() -> None:
            while not stop.is_set() and len(opened) < 8 * MAX_UNAUTHENTICATED:
                with suppress(OSError):
                    opened.append(socket.create_connection(parse_address(pair.prefill.driver.address), WAIT))
                if len(opened) > MAX_UNAUTHENTICATED:
                    flooding.set()
                    opened[-MAX_UNAUTHENTICATED].close()

        def end() -> None:
            stop.set()
            thread.join()
            for sock in opened:
                sock.close()

        thread = threading.Thread(target=flood)
        thread.start()
        stack.callback(end)
        assert flooding.wait(WAIT)
        hand_over(pair, "first")
        assert pair.decode.count("link_handshakes_total{result=failed}") == 0
        assert pair.decode.count("link_handshakes_total{result=ok}") == 1
    told = [record for record in caplog.records if "no control link with" in record.message]
    assert len(told) < MAX_UNAUTHENTICATED, "the log is not flooded either"


@dataclass
class Played:
    """An unauthenticated connection."""

    host: str
    heard_at: float
    has_spoken: bool


CONNECTIONS = st.lists(
    st.builds(Played, st.sampled_from("abc"), st.floats(0, 9), st.booleans()), min_size=1, max_size=20
)


@given(CONNECTIONS)
def test_room_is_made_by_the_address_that_holds_the_most_and_by_the_silent_first(
    connections: list[Played],
) -> None:
    """L7: fair between addresses, and to connections that have sent something."""
    gone = choose_displaced(connections)
    per_host = Counter(stranger.host for stranger in connections)
    assert per_host[gone.host] == max(per_host.values())
    for other in connections:
        if other.host == gone.host:
            assert (gone.has_spoken, gone.heard_at) <= (other.has_spoken, other.heard_at)


def test_a_data_connection_that_names_an_open_session_keeps_its_place() -> None:
    """L7: on the data ports an unauthenticated peer cannot name a session."""
    with data_port(300.0) as sender, ExitStack() as stack:
        sender._port._context.sessions.begin("token")
        reading = ReaderProofs(Source("p", "b", sender.address, "token"))
        (honest,) = silent_links(sender.address, 1, stack)
        write_frame(honest, reading.hello, MAX_DATA_FRAME_BYTES)
        challenge = read_frame(honest, DataChallenge, MAX_DATA_FRAME_BYTES)
        second = silent_links(sender.address, 70, stack)[0]
        assert second.recv(1) == b""
        write_frame(honest, reading.prove(challenge), MAX_DATA_FRAME_BYTES)
        assert read_frame(honest, DataReply, MAX_DATA_FRAME_BYTES).status is DataStatus.OK


def test_an_unauthenticated_data_connection_has_no_thread() -> None:
    """L7: 60 silent connections started 60 threads. Only an authenticated connection has one."""
    with data_port(300.0) as sender, ExitStack() as stack:
        sender._port._context.sessions.begin("token")
        source = Source("p", "b", sender.address, "token")
        leftovers = Leftovers()
        silent_links(sender.address, 60, stack)
        stack.enter_context(closing(TcpReceiver(WAIT))).probe(source, Read())
        assert len(leftovers.threads()) == 1


@pytest.mark.parametrize("beginning", [b"", b"\xff" * 8, b"\x08\0\0\0kvbaton", b"\0\x04\0\0" + b"\0" * 1028])
def test_a_malformed_message_on_a_data_port_ends_its_connection(beginning: bytes) -> None:
    """A peer that closes its side is dropped too; an honest one is accepted afterwards."""
    with data_port(300.0) as sender, ExitStack() as stack:
        sender._port._context.sessions.begin("token")
        (stranger,) = silent_links(sender.address, 1, stack)
        stranger.sendall(beginning)
        stranger.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
        source = Source("p", "b", sender.address, "token")
        stack.enter_context(closing(TcpReceiver(WAIT))).probe(source, Read())


def test_a_request_before_the_answer_to_the_proof_ends_the_connection() -> None:
    """Its session may be over."""
    with data_port(300.0) as sender, ExitStack() as stack:
        sender._port._context.sessions.begin("token")
        reading = ReaderProofs(Source("p", "b", sender.address, "token"))
        (hasty,) = silent_links(sender.address, 1, stack)
        write_frame(hasty, reading.hello, MAX_DATA_FRAME_BYTES)
        challenge = read_frame(hasty, DataChallenge, MAX_DATA_FRAME_BYTES)
        proof = encode_frame(reading.prove(challenge), MAX_DATA_FRAME_BYTES)
        hasty.sendall(proof + proof)
        with suppress(ConnectionResetError):
            assert hasty.recv(1) == b""


def test_a_listener_rests_after_a_few_connections() -> None:
    """L7: open connections are read between them, and the step of an engine continues."""
    listener = Listener(listen_on("127.0.0.1", 0))
    with selectors.DefaultSelector() as selector, ExitStack() as stack:
        stack.callback(listener.close)
        silent_links(f"127.0.0.1:{listener.port}", 10, stack)
        counts = list[int]()
        while sum(counts) < 10:
            listener.watch(selector)
            if selector.select(max(0.0, min(WAIT, listener.resume_at - time.monotonic()))):
                counts.append(len([stack.enter_context(sock) for sock in listener.accept_some()]))
                listener.watch(selector)
                assert selector.get_map() == {} or time.monotonic() >= listener.resume_at
        assert counts == [4, 4, 2]


def test_a_limited_log_line_counts_the_suppressed_ones() -> None:
    now = [0.0]
    limiter = LogLimiter(1.0, lambda: now[0])
    assert [limiter.admit() for _ in range(3)] == [0, None, None]
    now[0] = 1.0
    assert [limiter.admit(), limiter.admit()] == [2, None]
