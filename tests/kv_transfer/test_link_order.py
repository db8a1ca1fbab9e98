"""Messages that go out in the calling thread: in order behind the I/O thread's pending commands, and none is lost."""

import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from contract.errors import KvbatonError, TransferError
from contract.identity import Role
from engine.mailbox import Mailbox
from kv_transfer.counters import Counters
from kv_transfer.links.link import Link, PeerRef
from kv_transfer.links.link_loop import LinkLoop
from kv_transfer.protocol.handshake import Accepting, PeerTarget, Session
from kv_transfer.protocol.messages import CancelFetch, FetchBlocks, Message, Offer, TransferFailed
from tests.kv_transfer.builders import identity_for

WAIT = 30.0
LENDER, READER = PeerRef("lender", is_dialed=True), PeerRef("reader", is_dialed=False)
OTHER = PeerRef("other", is_dialed=True)


class Side:
    """A link loop and the messages that it received. busy_with: at this message its I/O thread waits for ``go_on``.

    holds: new links send nothing until ``resume``.
    """

    def __init__(self, boot_id: str, role: Role, peer_timeout_seconds: float = 300.0) -> None:
        self.boot_id = boot_id
        offers = [Offer("tcp", "127.0.0.1:1")]
        limits = {"peer_timeout_seconds": peer_timeout_seconds, "max_frame_bytes": 2**20}
        me = identity_for(boot_id[0], role, None, offers, boot_id=boot_id, **limits)
        self.loop = LinkLoop(me.settings, Counters())
        self.heard = Mailbox[Message]()
        self.busy_with: Message | None = None
        self.is_busy, self.go_on = threading.Event(), threading.Event()
        self.lost: list[KvbatonError] = []
        self.holds = False
        self.was_held = threading.Event()
        self.resume: Callable[[], None] | None = None
        self.loop.start(me, self)

    def link_up(self, ref: PeerRef, session: Session, resume: Callable[[], None]) -> bool:
        self.resume = resume
        if self.holds:
            self.was_held.set()
        return not self.holds

    def link_message(self, ref: PeerRef, message: Message) -> None:
        self.heard.put(message)
        if message == self.busy_with:
            self.is_busy.set()
            assert self.go_on.wait(WAIT)

    def link_down(self, ref: PeerRef, session: Session | None, error: KvbatonError) -> None:
        self.lost.append(error)

    def tick(self, now: float) -> float:
        return math.inf

    def thread_failed(self, thread: str, error: BaseException) -> None: ...


@contextmanager
def two_sides(lender_timeout_seconds: float = 300.0) -> Iterator[tuple[Side, Side]]:
    """Yield (reader, lender), with a link between them."""
    lender = Side("lender", Role.PREFILL, lender_timeout_seconds)
    reader = Side("reader", Role.DECODE)
    try:
        reader.loop.dial_and_send(target(lender), FetchBlocks("first", 0))
        assert lender.heard.get(WAIT) == FetchBlocks("first", 0)
        yield reader, lender
    finally:
        for side in (reader, lender):
            side.go_on.set()
            side.loop.close()


@contextmanager
def one_more() -> Iterator[Side]:
    """Yield another lender, without a link."""
    other = Side("other", Role.PREFILL)
    try:
        yield other
    finally:
        other.loop.close()


@contextmanager
def will_be_busy(side: Side) -> Iterator[threading.Event]:
    """Keep a side's I/O thread busy behind its present commands until the block ends; yield what is set when it is."""
    is_busy, go_on = threading.Event(), threading.Event()

    def work() -> None:
        is_busy.set()
        assert go_on.wait(WAIT)

    side.loop._commands.add(work, PeerRef("nobody", is_dialed=True))
    try:
        yield is_busy
    finally:
        go_on.set()


@contextmanager
def io_thread_is_busy(side: Side) -> Iterator[None]:
    with will_be_busy(side) as is_busy:
        assert is_busy.wait(WAIT)
        yield


def target(lender: Side) -> PeerTarget:
    boot_id = lender.boot_id
    return PeerTarget(boot_id[0], boot_id, lender.loop.address)


def test_messages_do_not_wait_for_the_io_thread() -> None:
    with two_sides() as (reader, lender):
        lender.busy_with = CancelFetch("busy", 0)
        reader.loop.send(LENDER, lender.busy_with)
        assert lender.is_busy.wait(WAIT)
        lender.loop.send(READER, TransferFailed("t", 0, "internal", "while its I/O thread is busy"))
        assert reader.heard.get(WAIT) == TransferFailed("t", 0, "internal", "while its I/O thread is busy")


def test_a_side_that_had_no_processor_does_not_take_its_peer_for_silent() -> None:
    """B13: what the peer has sent meanwhile lies unread in the socket, and is read before the peer is judged."""
    seconds = 2.0
    with two_sides(seconds) as (reader, lender):
        lender.busy_with = CancelFetch("busy", 0)
        reader.loop.send(LENDER, lender.busy_with)
        assert lender.is_busy.wait(WAIT)
        reader.loop.send(LENDER, CancelFetch("sent meanwhile", 0))
        time.sleep(1.25 * seconds)
        lender.go_on.set()
        assert [lender.heard.get(WAIT) for _ in range(2)] == [
            lender.busy_with,
            CancelFetch("sent meanwhile", 0),
        ]
        assert lender.lost == []


def test_a_fetch_does_not_wait_for_the_io_thread_when_there_is_a_link() -> None:
    """The thread may get no processor for many steps of a busy worker, and an answer that is moved waits for the fetch."""
    with two_sides() as (reader, lender):
        reader.busy_with = TransferFailed("busy", 0, "internal", "")
        lender.loop.send(READER, reader.busy_with)
        assert reader.is_busy.wait(WAIT)
        reader.loop.dial_and_send(target(lender), FetchBlocks("t", 0))
        assert lender.heard.get(WAIT) == FetchBlocks("t", 0), "while its I/O thread is busy"


def test_messages_follow_a_fetch_that_has_to_dial() -> None:
    with two_sides() as (reader, _), one_more() as other:
        words: list[Message] = [FetchBlocks("t", 0), CancelFetch("t", 0), CancelFetch("u", 0)]
        with io_thread_is_busy(reader):
            reader.loop.dial_and_send(target(other), words[0])
            for word in words[1:]:
                reader.loop.send(OTHER, word)
        assert [other.heard.get(WAIT) for _ in words] == words


def test_no_message_overtakes_an_earlier_command() -> None:
    """A message of which the link was held waits for the I/O thread; the next one waits too, though nothing holds it."""
    with two_sides() as (reader, _), one_more() as other:
        words: list[Message] = [FetchBlocks("t", 0), CancelFetch("t", 0), CancelFetch("u", 0)]
        reader.holds = True
        reader.loop.dial_and_send(target(other), words[0])
        assert reader.was_held.wait(WAIT)
        with ExitStack() as first, ExitStack() as second:
            first.enter_context(io_thread_is_busy(reader))
            assert reader.resume
            reader.resume()
            is_later = second.enter_context(will_be_busy(reader))
            reader.loop.send(OTHER, words[1])
            first.close()
            assert is_later.wait(WAIT)
            reader.loop.send(OTHER, words[2])
        assert [other.heard.get(WAIT) for _ in words] == words


def test_more_than_a_socket_takes_arrives_whole_and_in_order() -> None:
    with two_sides() as (reader, lender):
        reader.busy_with = TransferFailed("busy", 0, "internal", "")
        lender.loop.send(READER, reader.busy_with)
        assert reader.is_busy.wait(WAIT)
        words: list[Message] = [
            TransferFailed(str(number), 0, "internal", "x" * 500_000) for number in range(12)
        ]
        for word in words:
            lender.loop.send(READER, word)
        reader.go_on.set()
        assert reader.heard.get(WAIT) == reader.busy_with
        assert [reader.heard.get(WAIT) for _ in words] == words


def test_a_link_that_is_not_open_accepts_no_message() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.setblocking(False)
        link = Link(ours, Accepting(identity_for("p", Role.PREFILL)), 2**20, now=0.0)
        outbox = link.outbox
        word = CancelFetch("t", 0)
        assert not outbox.send_now(word)
        outbox.open()
        outbox.is_held = True
        assert not outbox.send_now(word)
        outbox.is_held = False
        assert outbox.send_now(word)
        assert not outbox.wants_write
        with pytest.raises(TransferError, match="a frame of"):
            outbox.send_now(TransferFailed("t", 0, "internal", "x" * 2**21))
        outbox.close()
        assert not outbox.send_now(word)
