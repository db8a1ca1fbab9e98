"""Peers without the cluster secret on the two ports, and a process without free descriptors."""

import logging
import math
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from contract.errors import KvbatonError
from contract.identity import Role
from engine.mailbox import Mailbox
from kv_transfer.counters import Counters
from kv_transfer.links.framing import parse_address
from kv_transfer.links.link import PeerRef
from kv_transfer.links.link_loop import LinkLoop
from kv_transfer.links.listening import MAX_UNAUTHENTICATED, Listener, listen_on, max_unauthenticated
from kv_transfer.links.open_links import Endpoint, Outcome, resolve
from kv_transfer.protocol.handshake import PeerTarget, Session
from kv_transfer.protocol.messages import CancelFetch, FetchBlocks, Message
from kv_transfer.transports.tcp.transport import TcpSender
from tests.descriptors import no_descriptor_left
from tests.kv_transfer.builders import hand_over, identity_for, pair_of, settings_for, worker
from tests.kv_transfer.fakes import context_of

WAIT = 30.0


def test_without_descriptors_a_listener_pauses_says_so_once_and_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    listener = Listener(listen_on("127.0.0.1", 0))
    with selectors.DefaultSelector() as selector, socket.socket() as dialer:
        with no_descriptor_left():
            dialer.connect(("127.0.0.1", listener.port))
            for _ in range(3):
                listener.watch(selector)
                assert selector.select(WAIT)
                assert listener.accept() is None
                listener.watch(selector)
                assert selector.select(0) == [], "it would spin"
                assert selector.get_map() == {}
                selector.select(max(0.0, listener.resume_at - time.monotonic()))
        listener.watch(selector)
        assert selector.select(WAIT)
        accepted = listener.accept()
        assert accepted is not None
        accepted.close()
        listener.close()
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "no connection is accepted" in caplog.text


def test_a_worker_survives_a_time_without_descriptors(caplog: pytest.LogCaptureFixture) -> None:
    def num_logged() -> int:
        return sum("no connection is accepted" in record.message for record in caplog.records)

    with pair_of() as pair, socket.socket() as control:
        driver = pair.prefill.driver
        hand_over(pair, "before")
        with no_descriptor_left():
            control.connect(parse_address(driver.address))
            driver.wait_for(lambda: num_logged() == 1, "the control port's pause")
        hand_over(pair, "after")


def silent_links(address: str, number: int, stack: ExitStack) -> list[socket.socket]:
    """Open connections that send nothing."""
    return [
        stack.enter_context(socket.create_connection(parse_address(address), timeout=WAIT))
        for _ in range(number)
    ]


def test_more_unfinished_handshakes_than_are_allowed_cost_the_oldest_its_place() -> None:
    with worker(settings_for("p", Role.PREFILL)) as prefill, ExitStack() as stack:
        oldest, second, *_ = silent_links(prefill.driver.address, MAX_UNAUTHENTICATED + 2, stack)
        assert oldest.recv(1) == b""
        assert second.recv(1) == b""
        assert prefill.count("link_handshakes_total{result=failed}") == 2


@contextmanager
def data_port(timeout_seconds: float) -> Iterator[TcpSender]:
    sender = TcpSender(context_of("b", read_timeout_seconds=timeout_seconds))
    try:
        yield sender
    finally:
        sender.close()


def test_more_than_64_silent_data_connections_cost_the_oldest_its_place() -> None:
    with data_port(300.0) as sender, ExitStack() as stack:
        oldest = silent_links(sender.address, 65, stack)[0]
        assert oldest.recv(1) == b""


def test_a_data_connection_that_greets_byte_by_byte_has_a_deadline_as_a_whole() -> None:
    """Each byte arrives in time for the socket; the greeting as a whole does not."""
    with data_port(0.3) as sender, socket.create_connection(parse_address(sender.address)) as sock:
        sock.settimeout(0.1)
        with suppress(ConnectionError):
            while True:
                sock.sendall(b"\0")
                try:
                    assert sock.recv(1) == b""
                except TimeoutError:
                    continue
                break


class LinkRecord:
    """The reports of an I/O thread."""

    def __init__(self) -> None:
        self.ends = Mailbox[tuple[str, str]]()

    def link_up(self, ref: PeerRef, session: Session, resume: Callable[[], None]) -> bool:
        return True

    def link_message(self, ref: PeerRef, message: Message) -> None: ...

    def link_down(self, ref: PeerRef, session: Session | None, error: KvbatonError) -> None:
        self.ends.put((ref.boot_id, error.message))

    def tick(self, now: float) -> float:
        return math.inf

    def thread_failed(self, thread: str, error: BaseException) -> None:
        self.ends.put((thread, repr(error)))


@contextmanager
def link_loop(
    lookup: Callable[[str, int], Outcome], peer_timeout_seconds: float
) -> Iterator[tuple[LinkLoop, LinkRecord]]:
    me = identity_for("d", Role.DECODE, peer_timeout_seconds=peer_timeout_seconds)
    loop, record = LinkLoop(me.settings, Counters(), lookup), LinkRecord()
    loop.start(me, record)
    try:
        yield loop, record
    finally:
        loop.close()


def test_a_slow_name_server_does_not_hold_the_links_up() -> None:
    """A peer with a name waits for its address; meanwhile another one is dialed, in vain, and reported."""
    gate = threading.Event()

    def lookup(_host: str, port: int) -> Outcome:
        assert gate.wait(WAIT)
        return resolve("127.0.0.1", port)

    with link_loop(lookup, 300.0) as (loop, record), socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and it does not listen
        port = closed.getsockname()[1]
        loop.dial_and_send(PeerTarget("named", "slow", f"some.name:{port}"), FetchBlocks("t", 0))
        loop.send(PeerRef("slow", is_dialed=True), CancelFetch("t", 0))
        loop.dial_and_send(PeerTarget("numbered", "quick", f"127.0.0.1:{port}"), FetchBlocks("t", 0))
        assert record.ends.get(WAIT)[0] == "quick"
        gate.set()
        boot_id, message = record.ends.get(WAIT)
        assert boot_id == "slow"
        assert "refused" in message


def test_a_look_up_that_takes_too_long_or_fails_is_reported() -> None:
    gate = threading.Event()

    def lookup(host: str, _port: int) -> Outcome:
        assert host == "bad" or gate.wait(WAIT)
        return OSError("no such name")

    with link_loop(lookup, 0.2) as (loop, record):
        loop.dial_and_send(PeerTarget("one", "late", "slow:1"), FetchBlocks("t", 0))
        assert record.ends.get(WAIT) == (
            "late",
            "worker one cannot be dialed: its name was not found within 0.2 s",
        )
        gate.set()
        loop.dial_and_send(PeerTarget("two", "bad", "bad:1"), FetchBlocks("t", 0))
        assert record.ends.get(WAIT) == ("bad", "worker two cannot be dialed: no such name")


def test_numbers_need_no_look_up() -> None:
    assert resolve("127.0.0.1", 5, socket.AI_NUMERICHOST) == Endpoint(socket.AF_INET, ("127.0.0.1", 5))
    assert resolve("::1", 5, socket.AI_NUMERICHOST) == Endpoint(socket.AF_INET6, ("::1", 5, 0, 0))
    assert isinstance(resolve("localhost", 5, socket.AI_NUMERICHOST), OSError)
    assert isinstance(resolve("x" * 300, 5), UnicodeError)


def test_a_link_loop_that_was_never_started_closes() -> None:
    LinkLoop(settings_for("d", Role.DECODE), Counters()).close()


@pytest.mark.parametrize(
    ("limit", "expected"), [(256, 32), (64, 8), (16, 8), (1024, 128), (2048, 256), (10**5, 256)]
)
def test_unauthenticated_connections_leave_descriptors_to_others(limit: int, expected: int) -> None:
    """P3: with 256 descriptors the unauthenticated connections of one port could hold all of them."""
    assert max_unauthenticated(MAX_UNAUTHENTICATED, limit) == expected
