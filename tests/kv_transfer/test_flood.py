"""A flood of connections on the control and the data port: an honest peer gets in at its first try."""

import socket
import threading
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.framing import parse_address, read_frame, write_frame
from kv_transfer.strangers import MAX_STRANGERS, Seldom, giving_way
from kv_transfer.transport import Source
from kv_transfer.transports.data_greeting import Reading
from kv_transfer.transports.tcp_wire import MAX_DATA_FRAME_BYTES, DataChallenge, DataReply, DataStatus
from tests.kv_transfer.builders import hand_over, pair_of
from tests.kv_transfer.test_strangers import WAIT, data_port, silent_links


def test_a_flood_of_silent_connections_costs_an_honest_peer_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """L7: a flood of the control port delayed the first hand-over: the honest peer gave way, and dialed again."""
    with pair_of() as pair, ExitStack() as stack:
        flooding, stop = threading.Event(), threading.Event()
        opened: list[socket.socket] = []

        def flood() -> None:
            while not stop.is_set() and len(opened) < 8 * MAX_STRANGERS:
                with suppress(OSError):
                    opened.append(socket.create_connection(parse_address(pair.prefill.driver.address), WAIT))
                if len(opened) > MAX_STRANGERS:
                    flooding.set()
                    opened[-MAX_STRANGERS].close()

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
    assert len(told) < MAX_STRANGERS, "the log is not flooded either"


@dataclass
class Played:
    """A stranger."""

    host: str
    heard_at: float
    has_spoken: bool


STRANGERS = st.lists(
    st.builds(Played, st.sampled_from("abc"), st.floats(0, 9), st.booleans()), min_size=1, max_size=20
)


@given(STRANGERS)
def test_room_is_made_by_the_address_that_holds_the_most_and_by_the_silent_first(
    strangers: list[Played],
) -> None:
    """L7: fair between addresses, and to those who have something to say."""
    gone = giving_way(strangers)
    per_host = Counter(stranger.host for stranger in strangers)
    assert per_host[gone.host] == max(per_host.values())
    for other in strangers:
        if other.host == gone.host:
            assert (gone.has_spoken, gone.heard_at) <= (other.has_spoken, other.heard_at)


def test_a_data_connection_that_names_an_open_session_keeps_its_place() -> None:
    """L7: on the data ports a stranger cannot name a session."""
    with data_port(300.0) as sender, ExitStack() as stack:
        sender._port._sessions.begin("token")
        reading = Reading(Source("p", "b", sender.address, "token"))
        (honest,) = silent_links(sender.address, 1, stack)
        write_frame(honest, reading.hello, MAX_DATA_FRAME_BYTES)
        challenge = read_frame(honest, DataChallenge, MAX_DATA_FRAME_BYTES)
        second = silent_links(sender.address, 70, stack)[0]
        assert second.recv(1) == b""
        write_frame(honest, reading.prove(challenge), MAX_DATA_FRAME_BYTES)
        assert read_frame(honest, DataReply, MAX_DATA_FRAME_BYTES).status is DataStatus.OK


def test_what_is_said_seldom_tells_how_often_it_was_not_said() -> None:
    now = [0.0]
    seldom = Seldom(1.0, lambda: now[0])
    assert [seldom.ask() for _ in range(3)] == [0, None, None]
    now[0] = 1.0
    assert [seldom.ask(), seldom.ask()] == [2, None]
