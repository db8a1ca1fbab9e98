"""Requests of the tcp transport that are sent before their reads begin: no read gets the blocks of another one."""

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.errors import InternalError, PeerUnreachableError
from contract.layout import KVLayout
from kv_transfer.links.framing import FrameBuffer, decode_body, read_frame
from kv_transfer.protocol.reads import (
    LeaseName,
    Read,
    ReadRequest,
    ReadStoppedError,
    Source,
    StaleLeaseError,
)
from kv_transfer.transports.data_handshake import MAX_DATA_FRAME_BYTES, DataStatus, reply_frame
from kv_transfer.transports.leases import Sessions
from kv_transfer.transports.tcp.transport import MAX_ASKED_BYTES, OK_FRAME, Asked, TcpReceiver, TcpSender
from tests.kv_transfer.fakes import ByteMemory, context_of
from tests.kv_transfer.greetings import prove_lending

WAIT = 30.0
SMALL = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=2, dtype="float32")
NUM_LEASES = 6


def name_of(number: int) -> LeaseName:
    return LeaseName(f"t{number}", 0, "lease")


def request_of(number: int) -> ReadRequest:
    return ReadRequest(name_of(number), 0, 1 + number % 3)


class Lender:
    """A sender of ``NUM_LEASES`` leases, whose blocks are full of their lease's number, and a receiver."""

    def __init__(self) -> None:
        self.sessions = Sessions()
        self.sender = TcpSender(context_of("b", self.sessions, lambda _name: None))
        self.sessions.begin("token")
        self.memory, self.target = ByteMemory(SMALL, 1 + 3 * NUM_LEASES), ByteMemory(SMALL, 3)
        self.sender.start(self.memory)
        self.receiver = TcpReceiver(WAIT)
        self.source = Source("p", "b", self.sender.address, "token")
        for number in range(NUM_LEASES):
            blocks = [1 + 3 * number + block for block in range(3)]
            for block in blocks:
                self.memory.fill(block, bytes([number + 1]))
            self.sender.publish(name_of(number), blocks)

    def fetch(self, number: int, following: Sequence[int], read: Read | None = None) -> set[int]:
        """Return the bytes that have arrived."""
        request = request_of(number)
        views = [self.target.write_view(block) for block in range(request.num_blocks)]
        for view in views:
            view[:] = bytes(len(view))
        wanted = [request_of(each) for each in following]
        self.receiver.fetch_first(self.source, request, views, read or Read(), wanted)
        return {byte for view in views for byte in view}

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()


@contextmanager
def lender() -> Iterator[Lender]:
    with closing(Lender()) as one:
        yield one


def frames_in(data: bytes) -> list[ReadRequest]:
    return [decode_body(body, ReadRequest) for body in FrameBuffer(MAX_DATA_FRAME_BYTES).feed(data)]


def test_a_group_is_asked_for_before_its_first_answer() -> None:
    """The sender of this test answers nothing before it has all three requests."""
    listener = socket.create_server(("127.0.0.1", 0))
    seen: list[ReadRequest] = []

    def serve() -> None:
        with listener, listener.accept()[0] as sock:
            sock.settimeout(WAIT)
            prove_lending(sock, "token", "tcp")
            sock.sendall(reply_frame(DataStatus.OK))
            seen.extend(read_frame(sock, ReadRequest, MAX_DATA_FRAME_BYTES) for _ in range(3))
            for number, request in enumerate(seen, 1):
                blocks = bytes([number]) * (SMALL.block_bytes * request.num_blocks)
                sock.sendall(OK_FRAME + blocks + OK_FRAME)

    thread = threading.Thread(target=serve)
    thread.start()
    source = Source("p", "b", f"127.0.0.1:{listener.getsockname()[1]}", "token")
    requests = [request_of(number) for number in range(3)]
    with closing(TcpReceiver(WAIT)) as receiver:
        for number, request in enumerate(requests):
            target = ByteMemory(SMALL, request.num_blocks)
            views = [target.write_view(block) for block in range(request.num_blocks)]
            receiver.fetch_first(source, request, views, Read(), requests[number + 1 :])
            assert {byte for view in views for byte in view} == {number + 1}
    thread.join()
    assert seen == requests


FATES = ("read", "never read", "ended", "stopped")


@settings(max_examples=60, deadline=None)
@given(
    plan=st.lists(st.tuples(st.integers(0, NUM_LEASES - 1), st.sampled_from(FATES)), min_size=1, max_size=8),
    num_known=st.lists(st.integers(0, 4), min_size=8, max_size=8),
)
def test_each_read_gets_its_own_blocks_whatever_becomes_of_those_that_were_asked_for(
    plan: list[tuple[int, str]], num_known: list[int]
) -> None:
    """Reads that were asked for do not come, their leases end, or they are stopped; the others bring what they name."""
    ended: set[int] = set()
    with lender() as pair:
        for at, (number, fate) in enumerate(plan):
            following = [number for number, _ in plan[at + 1 :]][: num_known[at]]
            if fate == "never read":
                continue
            read = Read()
            if fate == "ended":
                pair.sender.release(name_of(number))
                ended.add(number)
            if fate == "stopped":
                read.stop()
                with pytest.raises(ReadStoppedError):
                    pair.fetch(number, following, read)
                continue
            try:
                assert pair.fetch(number, following) == {number + 1}
            except StaleLeaseError:
                assert number in ended  # if it is read all the same, it was sent while its lease was valid
            except PeerUnreachableError:
                assert ended, "a lease that ends while its blocks are sent ends the connection"
                assert number in ended or pair.fetch(number, following) == {number + 1}


def test_a_read_that_comes_out_of_turn_is_read_over_another_connection() -> None:
    with lender() as pair:
        assert pair.fetch(0, [1, 2]) == {1}
        assert pair.fetch(2, [1]) == {3}
        assert pair.fetch(1, []) == {2}


def test_a_probe_does_not_take_the_blocks_of_a_read() -> None:
    with lender() as pair:
        assert pair.fetch(0, [1]) == {1}
        assert pair.receiver.probe(pair.source, Read()) is None
        assert pair.fetch(1, []) == {2}


def test_a_stale_lease_that_was_asked_for_costs_the_reads_behind_it_nothing() -> None:
    with lender() as pair:
        pair.sender.release(name_of(1))
        assert pair.fetch(0, [1, 2]) == {1}
        with pytest.raises(StaleLeaseError):
            pair.fetch(1, [2])
        assert pair.fetch(2, []) == {3}


def test_a_request_is_sent_once_and_later_ones_join_those_that_were_sent() -> None:
    asked = Asked()
    (a, b, c, d) = [request_of(number) for number in range(4)]
    assert frames_in(asked.frames_for(a, [b])) == [a, b]
    assert frames_in(asked.frames_for(b, [c, d])) == [c, d]
    assert frames_in(asked.frames_for(c, [d])) == []
    assert asked.is_first(d)
    with pytest.raises(InternalError, match="another read"):
        asked.frames_for(a, [])


def test_nothing_more_is_asked_for_behind_a_read_that_will_not_come() -> None:
    asked = Asked()
    (a, b, c, d) = [request_of(number) for number in range(4)]
    asked.frames_for(a, [b, c])
    assert asked.frames_for(b, [d]) == b""
    assert asked.is_first(c)


def test_a_request_is_not_sent_behind_one_of_another_read() -> None:
    asked = Asked()
    (a, b, c, d) = [request_of(number) for number in range(4)]
    assert frames_in(asked.add([a, b])) == [a, b]
    assert frames_in(asked.add([a, b, c])) == [c]
    assert asked.add([b, c, d]) == b""
    assert frames_in(asked.frames_for(a, [b, c])) == []


def test_an_idle_connection_sends_a_request_before_it_is_fetched() -> None:
    """The sender of this test answers when nothing is fetched yet."""
    listener = socket.create_server(("127.0.0.1", 0))
    answered = threading.Event()

    def serve() -> None:
        with listener, listener.accept()[0] as sock:
            sock.settimeout(WAIT)
            prove_lending(sock, "token", "tcp")
            sock.sendall(reply_frame(DataStatus.OK))
            for number in range(2):
                read_frame(sock, ReadRequest, MAX_DATA_FRAME_BYTES)
                sock.sendall(OK_FRAME + bytes([number + 1]) * SMALL.block_bytes + OK_FRAME)
            answered.set()

    thread = threading.Thread(target=serve)
    thread.start()
    source = Source("p", "b", f"127.0.0.1:{listener.getsockname()[1]}", "token")
    target = ByteMemory(SMALL, 2)
    with closing(TcpReceiver(WAIT)) as receiver:
        receiver.ask(source, [request_of(0)])  # there is no connection yet
        receiver.fetch(source, request_of(0), [target.write_view(0)], Read())
        receiver.ask(source, [request_of(3)])
        assert answered.wait(WAIT)
        assert not any(target.read_view(1))
        receiver.fetch(source, request_of(3), [target.write_view(1)], Read())
    thread.join()
    assert (set(target.read_view(0)), set(target.read_view(1))) == ({1}, {2})


def test_reads_that_were_asked_for_and_do_not_come_cost_the_others_nothing() -> None:
    with lender() as pair:
        assert pair.fetch(0, []) == {1}
        pair.receiver.ask(pair.source, [request_of(1)])
        assert pair.fetch(2, [3]) == {3}
        pair.receiver.ask(pair.source, [request_of(3), request_of(4)])
        assert pair.fetch(3, [4]) == {4}
        assert pair.fetch(4, []) == {5}


def test_nothing_is_asked_over_a_connection_that_the_sender_has_closed() -> None:
    with lender() as pair:
        assert pair.fetch(0, []) == {1}
        pair.sender.release(name_of(1))
        with pytest.raises(StaleLeaseError):
            pair.fetch(1, [])
        pair.receiver.ask(pair.source, [request_of(2)])
        assert pair.fetch(2, []) == {3}
        pair.sessions.end("token")
        pair.receiver.ask(pair.source, [request_of(3)])
        with pytest.raises(PeerUnreachableError):
            pair.fetch(3, [])


def test_requests_that_are_not_answered_fit_into_the_buffers_of_the_sockets() -> None:
    """A sender that sends blocks reads no requests: with more of them both ends would wait for each other."""
    asked = Asked()
    requests = [ReadRequest(LeaseName(f"{number}" + "x" * 500, 0, "l"), 0, 1) for number in range(40)]
    total = len(asked.frames_for(requests[0], requests[1:]))
    assert total - 600 <= MAX_ASKED_BYTES < 40 * 500
    for number, request in enumerate(requests[1:], 1):
        total += len(asked.frames_for(request, requests[number + 1 :]))
    assert total == sum(len(Asked().frames_for(each, [])) for each in requests)
