"""A data connection's bytes: frames and blocks over a socket on which the kernel alone waits.

A piece of a read crosses in one system call at each end (a blocking ``sendmsg`` here, ``MSG_WAITALL`` there), and Python
runs between pieces only: it neither waits itself nor cuts its list of buffers anew after every few kilobytes.
"""

import math
import socket
import struct
from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from kv_transfer.links.framing import (
    FrameBuffer,
    ShortReadError,
    decode_body,
    encode_frame,
    read_frame,
    receive_all,
)
from kv_transfer.transports.block_vectors import SocketBlocks
from kv_transfer.transports.data_wire import MAX_DATA_FRAME_BYTES

_TIMEVAL = struct.Struct("@ll")
_MAX_SECONDS = 10_000_000
_T = TypeVar("_T")
_P = ParamSpec("_P")


def _in_time(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """A wait that was too long is what the kernel calls a socket that would block."""

    @wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return method(*args, **kwargs)
        except BlockingIOError as error:
            raise TimeoutError("timed out") from error

    return call


class DataStream:
    """The socket of a data connection, which others may shut down. One thread uses it.

    Every method raises TimeoutError when the peer let no byte through for as long as ``wait_at_most`` allows, OSError
    for a broken connection, TransferError for words that are none.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._questions = FrameBuffer(MAX_DATA_FRAME_BYTES)
        self._unread: deque[bytes] = deque()

    def wait_at_most(self, receive_seconds: float, send_seconds: float) -> None:
        """Bound every wait for the peer from now on; 0 waits for ever."""
        self._sock.settimeout(None)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(receive_seconds))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(send_seconds))

    def say(self, message: Any) -> None:
        """Send a frame."""
        self.send(encode_frame(message, MAX_DATA_FRAME_BYTES))

    @_in_time
    def send(self, frames: bytes) -> None:
        """Send whole frames that are encoded already."""
        self._sock.sendall(frames)

    @_in_time
    def send_blocks(self, frames: bytes, blocks: SocketBlocks, start: int, end: int) -> None:
        """Send the bytes of the blocks ``start``..``end`` - 1 behind whole frames."""
        blocks.send(self._sock, frames, start, end)

    @_in_time
    def hear(self, message_type: type[_T]) -> _T:
        """Receive a frame. Raises TransferError for a closed, oversized or malformed one."""
        return read_frame(self._sock, message_type, MAX_DATA_FRAME_BYTES)

    def hear_question(self, message_type: type[_T]) -> _T:
        """Receive a frame, reading all that have arrived by one call: for streams that carry nothing but frames."""
        while not self._unread:
            data = self._sock.recv(MAX_DATA_FRAME_BYTES)
            if not data:
                raise ShortReadError(0, 1)
            self._unread.extend(self._questions.feed(data))
        return decode_body(self._unread.popleft(), message_type)

    @_in_time
    def take(self, num_bytes: int) -> bytearray:
        """Receive so many bytes. Raises ShortReadError."""
        data = bytearray(num_bytes)
        receive_all(self._sock, [memoryview(data)], socket.MSG_WAITALL)
        return data

    @_in_time
    def fill_blocks(self, frames: bytearray, blocks: SocketBlocks, start: int, end: int) -> None:
        """Receive until ``frames`` and the blocks ``start``..``end`` - 1 behind them are full. Raises ShortReadError."""
        blocks.receive(self._sock, frames, start, end)


def _timeval(seconds: float) -> bytes:
    """What the kernel takes; there 0 is for ever, so nothing else is rounded down to it."""
    microseconds = math.ceil(min(seconds, _MAX_SECONDS) * 1e6)
    return _TIMEVAL.pack(*divmod(microseconds, 1_000_000))
