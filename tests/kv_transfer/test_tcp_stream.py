"""A data connection's bytes: whole pieces at a time, bounded waits, and frames that keep the blocks aligned."""

import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kv_transfer.links.framing import HEADER, ShortReadError, encode_frame
from kv_transfer.protocol.reads import LeaseName, ReadRequest
from kv_transfer.transports.data_handshake import (
    ALIGNMENT,
    MAX_DATA_FRAME_BYTES,
    DataReply,
    DataStatus,
    reply_frame,
)
from kv_transfer.transports.data_port import leave_unpaced, limit_waits
from kv_transfer.transports.tcp.socket_blocks import socket_blocks
from kv_transfer.transports.tcp.transport import OK_FRAME, STALE_FRAME, requests_from

WAIT = 30.0
Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """A socket whose waits are bounded by the kernel, and its peer."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as sock,
        listener.accept()[0] as peer,
    ):
        limit_waits(sock, WAIT, WAIT)
        peer.settimeout(WAIT)
        yield sock, peer


def test_reply_frames_keep_the_blocks_aligned() -> None:
    for length in range(2 * ALIGNMENT):
        frame = reply_frame(DataStatus.STALE, "x" * length)
        assert len(frame) % ALIGNMENT == 0
        read = msgspec.msgpack.decode(frame[HEADER.size :], type=DataReply)
        assert (read.status, read.message) == (DataStatus.STALE, "x" * length)
    assert {len(OK_FRAME), len(STALE_FRAME)} == {ALIGNMENT}


def test_frames_and_blocks_arrive_in_order_however_they_are_cut(ends: Ends) -> None:
    sock, peer = ends
    for part in (b"fra", b"mesabc", b"de", b"fghij", b"klend"):
        peer.sendall(part)
    frames, blocks = bytearray(6), [memoryview(bytearray(4)) for _ in range(3)]
    socket_blocks(blocks).receive(sock, frames, 0, 3)
    assert [bytes(each) for each in (frames, *blocks)] == [b"frames", b"abcd", b"efgh", b"ijkl"]
    assert sock.recv(3) == b"end"


def test_requests_are_received_as_they_come(ends: Ends) -> None:
    sock, peer = ends
    sent = [ReadRequest(LeaseName("t", 0, "l"), number, 1) for number in range(3)]
    frames = b"".join(encode_frame(each, MAX_DATA_FRAME_BYTES) for each in sent)
    peer.sendall(frames[:-3])
    requests = requests_from(sock)
    assert [next(requests) for _ in range(2)] == sent[:2]
    peer.sendall(frames[-3:])
    assert next(requests) == sent[2]
    peer.close()
    with pytest.raises(ShortReadError):
        next(requests)


def test_blocks_are_sent_behind_their_frames(ends: Ends) -> None:
    sock, peer = ends
    frames = encode_frame(DataReply(DataStatus.OK, "go"), MAX_DATA_FRAME_BYTES)
    blocks = socket_blocks([memoryview(b"no"), memoryview(b"one"), memoryview(b"two")])
    blocks.send(sock, frames, 1, 3)
    wanted = frames + b"onetwo"
    assert peer.recv(len(wanted), socket.MSG_WAITALL) == wanted


def test_waits_for_a_silent_peer_are_bounded(ends: Ends) -> None:
    sock, peer = ends
    limit_waits(sock, 0.05, 0.05)
    block = memoryview(bytearray(8))
    with pytest.raises(BlockingIOError):
        sock.recv(1)
    with pytest.raises(BlockingIOError):
        socket_blocks([block]).receive(sock, bytearray(), 0, 1)
    peer.sendall(b"half")
    with pytest.raises(BlockingIOError):
        socket_blocks([block]).receive(sock, bytearray(), 0, 1)
    assert bytes(block[:4]) == b"half"
    with pytest.raises(BlockingIOError):
        socket_blocks([memoryview(bytes(2**26))]).send(sock, b"", 0, 1)


def test_the_shortest_timeout_is_not_endless(ends: Ends) -> None:
    """For the kernel 0 is for ever; a value near 0 must not become it."""
    sock, _peer = ends
    limit_waits(sock, 1e-9, 1e-9)
    with pytest.raises(BlockingIOError):
        sock.recv(1)


def test_a_short_read_has_the_number_of_received_bytes(ends: Ends) -> None:
    sock, peer = ends
    peer.sendall(b"12345")
    peer.close()
    blocks = socket_blocks([memoryview(bytearray(4)), memoryview(bytearray(4))])
    with pytest.raises(ShortReadError) as caught:
        blocks.receive(sock, bytearray(2), 0, 2)
    assert caught.value.num_bytes == 5


@pytest.mark.parametrize(("first_block", "num_blocks"), [(0, 0), (3, -1), (-1, 2)])
def test_a_request_for_nothing_or_for_blocks_before_a_lease_is_no_request(
    first_block: int, num_blocks: int
) -> None:
    request = ReadRequest(LeaseName("t", 0, "l"), first_block, num_blocks)
    frame = encode_frame(request, MAX_DATA_FRAME_BYTES)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(frame[HEADER.size :], type=ReadRequest)


class Chosen(socket.socket):
    """A connection between these hosts, for which the system has chosen this congestion control."""

    def __init__(self, ours: str, theirs: str, algorithm: bytes, may_choose: bool) -> None:
        super().__init__()
        self._ours, self._theirs, self._may_choose = ours, theirs, may_choose
        self.algorithm = algorithm

    def getsockname(self) -> tuple[str, int]:
        return self._ours, 1

    def getpeername(self) -> tuple[str, int]:
        return self._theirs, 2

    def getsockopt(self, level: int, option: int, *_: Any) -> Any:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_CONGESTION)
        return self.algorithm.ljust(16, b"\0")

    def setsockopt(self, level: int, option: int, value: Any, *_: Any) -> None:
        assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_CONGESTION)
        if not self._may_choose:
            raise PermissionError
        self.algorithm = value


@pytest.mark.parametrize(
    ("theirs", "algorithm", "may_choose", "then"),
    [
        ("10.0.0.1", b"bbr", True, b"reno"),
        ("10.0.0.1", b"bbr2", True, b"reno"),
        ("10.0.0.1", b"bbr", False, b"bbr"),
        ("10.0.0.1", b"cubic", True, b"cubic"),
        ("10.0.0.2", b"bbr", True, b"bbr"),
    ],
)
def test_only_what_stays_within_a_machine_is_left_unpaced(
    theirs: str, algorithm: bytes, may_choose: bool, then: bytes
) -> None:
    with Chosen("10.0.0.1", theirs, algorithm, may_choose) as sock:
        leave_unpaced(sock)
        assert sock.algorithm == then


def test_a_real_connection_goes_on_with_what_it_was_left_with() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
    ):
        other = server.accept()[0]
        leave_unpaced(other)
        chosen = other.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        assert not chosen.startswith(b"bbr")
        other.sendall(b"bytes")
        assert one.recv(5) == b"bytes"
        other.close()
