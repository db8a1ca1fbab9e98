"""A data connection's bytes: whole pieces at a time, bounded waits, and frames that keep the blocks aligned."""

import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from contract.errors import TransferError
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
from kv_transfer.transports.tcp.stream import OK_FRAME, STALE_FRAME, DataStream, socket_blocks

WAIT = 30.0
Ends = tuple[DataStream, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """A stream, and its peer's plain socket."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as sock,
        listener.accept()[0] as peer,
    ):
        stream = DataStream(sock)
        limit_waits(sock, WAIT, WAIT)
        peer.settimeout(WAIT)
        yield stream, peer


def test_what_the_sender_says_keeps_the_blocks_aligned() -> None:
    for length in range(2 * ALIGNMENT):
        frame = reply_frame(DataStatus.STALE, "x" * length)
        assert len(frame) % ALIGNMENT == 0
        read = msgspec.msgpack.decode(frame[HEADER.size :], type=DataReply)
        assert (read.status, read.message) == (DataStatus.STALE, "x" * length)
    assert {len(OK_FRAME), len(STALE_FRAME)} == {ALIGNMENT}


def test_words_and_blocks_arrive_in_order_however_they_are_cut(ends: Ends) -> None:
    stream, peer = ends
    for part in (b"wor", b"dsabc", b"de", b"fghij", b"klend"):
        peer.sendall(part)
    words, blocks = bytearray(5), [memoryview(bytearray(4)) for _ in range(3)]
    stream.receive_blocks(words, socket_blocks(blocks), 0, 3)
    assert [bytes(each) for each in (words, *blocks)] == [b"words", b"abcd", b"efgh", b"ijkl"]
    assert stream.receive_bytes(3) == b"end"


def test_questions_are_taken_as_they_come(ends: Ends) -> None:
    stream, peer = ends
    asked = [ReadRequest(LeaseName("t", 0, "l"), number, 1) for number in range(3)]
    frames = b"".join(encode_frame(each, MAX_DATA_FRAME_BYTES) for each in asked)
    peer.sendall(frames[:-3])
    assert [stream.receive_request(ReadRequest) for _ in range(2)] == asked[:2]
    peer.sendall(frames[-3:])
    assert stream.receive_request(ReadRequest) == asked[2]
    peer.close()
    with pytest.raises(ShortReadError):
        stream.receive_request(ReadRequest)


def test_blocks_go_out_behind_their_words(ends: Ends) -> None:
    stream, peer = ends
    words = encode_frame(DataReply(DataStatus.OK, "go"), MAX_DATA_FRAME_BYTES)
    stream.send_blocks(
        words, socket_blocks([memoryview(b"no"), memoryview(b"one"), memoryview(b"two")]), 1, 3
    )
    wanted = words + b"onetwo"
    assert peer.recv(len(wanted), socket.MSG_WAITALL) == wanted


def test_a_peer_that_says_nothing_or_takes_nothing_is_waited_for_so_long_and_no_longer(ends: Ends) -> None:
    stream, peer = ends
    limit_waits(stream._sock, 0.05, 0.05)
    block = memoryview(bytearray(8))
    with pytest.raises(TimeoutError):
        stream.receive_bytes(8)
    with pytest.raises(TimeoutError):
        stream.receive_blocks(bytearray(), socket_blocks([block]), 0, 1)
    peer.sendall(b"half")
    with pytest.raises(TimeoutError):
        stream.receive_blocks(bytearray(), socket_blocks([block]), 0, 1)
    assert bytes(block[:4]) == b"half"
    with pytest.raises(TimeoutError):
        stream.send_blocks(b"", socket_blocks([memoryview(bytes(2**26))]), 0, 1)


def test_the_shortest_patience_is_no_eternity(ends: Ends) -> None:
    """The kernel takes 0 for ever; what is nearly 0 must not become it."""
    stream, _peer = ends
    limit_waits(stream._sock, 1e-9, 1e-9)
    with pytest.raises(TimeoutError):
        stream.receive_bytes(1)


def test_a_stream_that_ends_early_says_how_far_it_came(ends: Ends) -> None:
    stream, peer = ends
    peer.sendall(b"12345")
    peer.close()
    with pytest.raises(ShortReadError) as caught:
        stream.receive_blocks(
            bytearray(2), socket_blocks([memoryview(bytearray(4)), memoryview(bytearray(4))]), 0, 2
        )
    assert caught.value.num_bytes == 5
    with pytest.raises(TransferError, match="closed after 0 of 8 bytes"):
        stream.receive_bytes(8)


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
