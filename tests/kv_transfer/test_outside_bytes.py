"""Any bytes of unauthenticated peers on the internal sockets end one connection and nothing else."""

import socket
import string
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.decoding import decode_outside
from contract.errors import TransferError
from kv_transfer.links.framing import FrameBuffer, as_frame, decode_body, encode_frame, parse_address
from kv_transfer.protocol.messages import AnyMessage, decode_message
from kv_transfer.protocol.reads import ReadRequest
from kv_transfer.transports.data_handshake import (
    MAX_DATA_FRAME_BYTES,
    DataChallenge,
    DataHello,
    DataProve,
    DataReply,
    DataStatus,
)
from kv_transfer.transports.leases import BlockGrant, decode_grant
from kv_transfer.transports.nccl.transport import NcclPoolInfo
from kv_transfer.transports.nixl.sender import NixlAsk, NixlPoolInfo
from kv_transfer.transports.shm.sender import ShmPoolInfo
from tests.kv_transfer.shm_port import NAME, NUM_BLOCKS, Reader, ShmPort

WAIT = 30.0
_BODIES = (
    DataHello,
    DataChallenge,
    DataProve,
    DataReply,
    ReadRequest,
    NcclPoolInfo,
    NixlAsk,
    NixlPoolInfo,
    ShmPoolInfo,
)
_DECODERS: list[Callable[[bytes], Any]] = [
    decode_message,
    decode_grant,
    *(partial(decode_body, message_type=each) for each in _BODIES),
]
_DECODER_NAMES = ["decode_message", "decode_grant", *(each.__name__ for each in _BODIES)]
_VALID = [
    msgspec.msgpack.encode(DataReply(DataStatus.OK, "", b"\0" * 20)),
    msgspec.msgpack.encode(BlockGrant(3, 9, b"\1" * 16)),
    *(msgspec.msgpack.encode({"type": each.__struct_config__.tag}) for each in AnyMessage.__args__),
]
NESTED = st.builds(
    lambda mark, depth, end: mark * depth + end,
    st.sampled_from([b"\x91", b"\x81\xa1a", b"\x92\xc0", b"\xdc\x00\x01", b"\xdd\xff\xff\xff\xff"]),
    st.integers(1, 30_000),
    st.sampled_from([b"", b"\xc0", b"\xa1\xff"]),
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=40)
    | st.text(string.printable, max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5),
    max_leaves=12,
)
DAMAGED = st.builds(
    lambda valid, at, value: valid[: at % len(valid)] + value + valid[at % len(valid) :],
    st.sampled_from(_VALID),
    st.integers(0, 10_000),
    st.binary(min_size=1, max_size=4),
)
BYTES = st.one_of(st.binary(max_size=300), NESTED, DAMAGED, VALUES.map(msgspec.msgpack.encode))


@pytest.mark.parametrize("decode", _DECODERS, ids=_DECODER_NAMES)
@given(data=BYTES)
def test_a_decoder_of_outside_bytes_raises_a_transfer_error_only(
    decode: Callable[[bytes], Any], data: bytes
) -> None:
    """M1: RecursionError was not caught."""
    try:
        decode(data)
    except TransferError as error:
        assert error.message


@given(data=st.binary(max_size=200), max_bytes=st.integers(0, 64))
def test_a_frame_buffer_raises_a_transfer_error_only(data: bytes, max_bytes: int) -> None:
    """M1: neither a wrong length nor a wrong checksum ends more than its stream."""
    try:
        for body in FrameBuffer(max_bytes).feed(data):
            assert len(body) <= max_bytes
    except TransferError as error:
        assert error.message


@pytest.mark.parametrize(
    "raised", [RecursionError("deep"), OverflowError("long"), MemoryError(), UnicodeError("half")]
)
def test_whatever_a_decoder_raises_becomes_the_callers_error(raised: Exception) -> None:
    """M1: every error that decoding can raise is one refusal."""

    def decode(_data: bytes) -> None:
        raise raised

    with pytest.raises(TransferError, match=r"it is broken: .+"):
        decode_outside(decode, b"", lambda why: TransferError(f"it is broken: {why}"))


NASTY = [
    b"\x91" * 30_000 + b"\xc0",
    b"\x81\xa1a" * 15_000 + b"\xc0",
    msgspec.msgpack.encode({"token": "\0" * 100}),
    msgspec.msgpack.encode({"token": 7}),
    b"\x81\xa5token\xa2\xff\xff",
    b"",
]


@pytest.mark.parametrize("body", NASTY, ids=range(len(NASTY)))
def test_an_unauthenticated_frame_does_not_end_the_shm_port(tmp_path: Path, body: bytes) -> None:
    """M1: a frame of 30,000 nested arrays ended the thread of the shm socket, and with it the worker."""
    assert len(body) <= MAX_DATA_FRAME_BYTES
    port, reader = ShmPort(tmp_path), Reader()
    grants = port.publish(NAME, range(NUM_BLOCKS))
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.settimeout(WAIT)
            stranger.connect(port.sender.address)
            stranger.sendall(as_frame(body))
            with suppress(ConnectionResetError):
                while stranger.recv(65536):
                    pass
        reader.fetch(port.source, range(3), grants)
        assert reader.first_bytes(3) == [1, 2, 3]
    finally:
        reader.receiver.close()
        port.sender.close()


def test_a_frame_that_is_whole_and_good_is_decoded() -> None:
    frame = encode_frame(DataHello("t", "shm", "n"), MAX_DATA_FRAME_BYTES)
    (body,) = FrameBuffer(MAX_DATA_FRAME_BYTES).feed(frame)
    assert decode_body(body, DataHello) == DataHello("t", "shm", "n")


ADDRESSES = st.builds(
    lambda host, colon, port: host + colon + port,
    st.text(max_size=300) | st.sampled_from(["127.0.0.1", "[::1]", "h"]),
    st.sampled_from(["", ":"]),
    st.text(max_size=8) | st.sampled_from(["²", "١", "1" * 5000, "-1", "65536", "65535", "+1", "1_0", " 1"]),
)


@given(address=ADDRESSES)
def test_an_address_that_a_peer_has_given_is_one_or_a_transfer_error(address: str) -> None:
    """M1: "h:²" ended the thread of the links with a ValueError, and with it the worker."""
    try:
        host, port = parse_address(address)
    except TransferError as error:
        assert len(error.message) < 400
    else:
        assert 0 <= port <= 65535
        assert 0 < len(host) + 2 <= 257
