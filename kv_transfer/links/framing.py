"""Length-prefixed msgpack frames, and buffers sent and received over sockets.

A frame over its bound is rejected before it is read, and one that does not match its checksum before it is decoded.
"""

import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, TypeVar

import msgspec
import xxhash

from contract.decoding import decode_outside, msgpack_decoder, shown
from contract.errors import TransferError

HEADER = struct.Struct("<II")
"""The body's length in bytes and its xxh32."""
_MAX_PORT = 65535
_MAX_HOST_CHARACTERS = 255
_T = TypeVar("_T")
# A decoder of each type is made once: making one describes the type.
_decoder_of: Callable[[Any], msgspec.msgpack.Decoder[Any]] = cache(msgpack_decoder)


def encode_frame(message: Any, max_bytes: int) -> bytes:
    """Encode a message as one frame. Raises TransferError if it is larger than ``max_bytes``."""
    body = msgspec.msgpack.encode(message)
    if len(body) > max_bytes:
        raise TransferError(f"a frame of {len(body)} bytes; the limit is {max_bytes}")
    return as_frame(body)


def as_frame(body: bytes) -> bytes:
    """Put the header before a body."""
    return HEADER.pack(len(body), xxhash.xxh32_intdigest(body)) + body


def length_in(header: bytes | bytearray, max_bytes: int) -> int:
    """Return the body's length. Raises TransferError if it is over the bound."""
    length: int = HEADER.unpack_from(header)[0]
    if length > max_bytes:
        raise TransferError(f"the peer sent a frame of {length} bytes; the limit is {max_bytes}")
    return length


def check_body(header: bytes | bytearray, body: bytes | bytearray) -> None:
    """Raise TransferError if the body does not match the header's checksum."""
    if xxhash.xxh32_intdigest(body) != HEADER.unpack_from(header)[1]:
        raise TransferError(f"a frame of {len(body)} bytes does not match its checksum")


def decode_body(body: bytes | bytearray, message_type: type[_T]) -> _T:
    """Decode the body of a frame. Raises TransferError."""
    message: _T = decode_outside(
        _decoder_of(message_type).decode,
        body,
        lambda why: TransferError(f"the peer sent a malformed frame: {why}"),
    )
    return message


class FrameBuffer:
    """A byte stream that is cut into frames. ``max_bytes`` may be raised once the peer is authenticated."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._bytes = bytearray()

    @property
    def is_empty(self) -> bool:
        """True if no part of a frame is buffered."""
        return not self._bytes

    def feed(self, data: bytes | bytearray) -> Iterator[bytes]:
        """Add bytes and yield the bodies that are complete. Raises TransferError for an oversized or damaged one."""
        self._bytes += data
        while len(self._bytes) >= HEADER.size:
            end = HEADER.size + length_in(self._bytes, self.max_bytes)
            if len(self._bytes) < end:
                return
            body = bytes(self._bytes[HEADER.size : end])
            check_body(self._bytes, body)
            del self._bytes[:end]
            yield body


def write_frame(sock: socket.socket, message: Any, max_bytes: int) -> None:
    """Send one frame over a blocking socket."""
    sock.sendall(encode_frame(message, max_bytes))


def read_frame(sock: socket.socket, message_type: type[_T], max_bytes: int) -> _T:
    """Receive one frame over a blocking socket. Raises TransferError if it is cut off, oversized, damaged or malformed."""
    header = bytearray(HEADER.size)
    receive_all(sock, [memoryview(header)])
    body = bytearray(length_in(header, max_bytes))
    receive_all(sock, [memoryview(body)])
    check_body(header, body)
    return decode_body(body, message_type)


class ShortReadError(TransferError):
    """The stream ended early, after ``num_bytes`` bytes."""

    def __init__(self, num_bytes: int, wanted: int) -> None:
        super().__init__(f"the connection was closed after {num_bytes} of {wanted} bytes")
        self.num_bytes = num_bytes


def send_all(sock: socket.socket, views: Sequence[memoryview]) -> None:
    """Send all buffers, many per system call."""
    rest = views
    left = sum(map(len, views))
    while left:
        count = sock.sendmsg(rest)
        left -= count
        rest = _after(rest, count) if left else ()


def receive_all(sock: socket.socket, views: Sequence[memoryview], flags: int = 0) -> None:
    """Fill all buffers, many per system call. flags: for ``recvmsg``. Raises ShortReadError."""
    wanted = left = sum(map(len, views))
    rest = views
    while left:
        count = sock.recvmsg_into(rest, 0, flags)[0]
        if count == 0:
            raise ShortReadError(wanted - left, wanted)
        left -= count
        rest = _after(rest, count) if left else ()


def _after(views: Sequence[memoryview], count: int) -> Sequence[memoryview]:
    for position, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[position + 1 :]]
        count -= len(view)
    return []


def parse_address(address: str) -> tuple[str, int]:
    """Split "host:port" or "[v6]:port" into host and port. Raises TransferError."""
    host, _, port = address.rpartition(":")
    is_port = (
        port.isascii() and port.isdigit() and len(port) <= len(str(_MAX_PORT)) and int(port) <= _MAX_PORT
    )
    is_host = 0 < len(host) <= _MAX_HOST_CHARACTERS and host.isprintable()
    if not is_host or not is_port:
        raise TransferError(f"invalid address {shown(address)!r}; it must read host:port")
    return host.strip("[]"), int(port)
