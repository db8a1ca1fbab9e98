"""One garbled bit in a text field makes invalid UTF-8: the connection of reader or sender ends, and nothing else."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.errors import TransferError
from kv_transfer.links.framing import HEADER, as_frame, encode_frame, read_frame
from kv_transfer.transports.data_handshake import MAX_DATA_FRAME_BYTES, DataHello, DataReply, DataStatus
from tests.kv_transfer.shm_port import NAME, NUM_BLOCKS, Reader, ShmPort

WAIT = 30.0


def garbled(frame: bytes, word: bytes) -> bytes:
    """Return the frame with an invalid UTF-8 byte in this word and a correct checksum."""
    body = frame[HEADER.size :]
    place = body.index(word)
    return as_frame(body[:place] + b"\xa7" + body[place + 1 :])


@pytest.fixture
def port(tmp_path: Path) -> Iterator[ShmPort]:
    port = ShmPort(tmp_path)
    port.publish(NAME, range(NUM_BLOCKS))
    yield port
    port.sender.close()


@pytest.mark.parametrize("word", [b"ok", b"status", b"because"])
def test_a_garbled_reply_is_a_transfer_error(word: bytes) -> None:
    """Found by schedule 810 of seed 77: it used to count as a bug of this worker."""
    frame = encode_frame(DataReply(DataStatus.OK, "because"), MAX_DATA_FRAME_BYTES)
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(WAIT)
        there.sendall(garbled(frame, word))
        with pytest.raises(TransferError, match="malformed frame"):
            read_frame(here, DataReply, MAX_DATA_FRAME_BYTES)


def test_invalid_text_from_an_unauthenticated_peer_does_not_end_the_shm_server(port: ShmPort) -> None:
    hello = garbled(encode_frame(DataHello("x" * 40, "tcp", "n"), MAX_DATA_FRAME_BYTES), b"xxx")
    assert len(hello) > HEADER.size
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.settimeout(WAIT)
        stranger.connect(port.source.address)
        stranger.sendall(hello)
        assert stranger.recv(1) == b""
    reader = Reader()
    reader.fetch(port.source, range(2, 4), port.grants[NAME])
    assert reader.first_bytes(2) == [3, 4]
    reader.receiver.close()
