"""A data connection's bytes: frames and blocks over a socket on which the kernel alone waits.

A piece of a read crosses in one system call at each end (a blocking ``sendmsg`` here, ``MSG_WAITALL`` there), and Python
runs between pieces only: it neither waits itself nor cuts its list of buffers anew after every few kilobytes.
"""

import math
import socket
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from contract.errors import TransferError
from kv_transfer.framing import (
    FrameBuffer,
    ShortReadError,
    decode_body,
    encode_frame,
    read_frame,
    receive_all,
    send_all,
)
from kv_transfer.transports.tcp_wire import ALIGNMENT, MAX_DATA_FRAME_BYTES

_TIMEVAL = struct.Struct("@ll")
_MAX_SECONDS = 10_000_000
_T = TypeVar("_T")


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

    def say(self, message: Any, blocks: Sequence[memoryview] = ()) -> None:
        """Send a frame, and the bytes of ``blocks`` behind it."""
        self.say_all([message], blocks)

    def say_all(self, messages: Iterable[Any], blocks: Sequence[memoryview] = ()) -> None:
        """Send frames, and the bytes of ``blocks`` behind the last of them."""
        frames = b"".join(encode_frame(message, MAX_DATA_FRAME_BYTES) for message in messages)
        with _timeouts():
            send_all(self._sock, [memoryview(frames), *blocks])

    def hear(self, message_type: type[_T]) -> _T:
        """Receive a frame. Raises TransferError for a closed, oversized or malformed one."""
        with _timeouts():
            return read_frame(self._sock, message_type, MAX_DATA_FRAME_BYTES)

    def hear_question(self, message_type: type[_T]) -> _T:
        """The same, taken from as many as there are, by one call: for who is sent nothing but frames."""
        while not self._unread:
            data = self._sock.recv(MAX_DATA_FRAME_BYTES)
            if not data:
                raise ShortReadError(0, 1)
            self._unread.extend(self._questions.feed(data))
        return decode_body(self._unread.popleft(), message_type)

    @property
    def has_question(self) -> bool:
        """Another one has arrived already."""
        return bool(self._unread)

    def hear_answers(self, message_type: type[_T], count: int) -> Iterator[_T]:
        """The next ``count`` frames, of which each has a length that is a multiple of ALIGNMENT; by one call, if short."""
        answers, data = FrameBuffer(MAX_DATA_FRAME_BYTES), self._take(count * ALIGNMENT)
        while count:
            for body in answers.feed(data):
                count -= 1
                if not count and not answers.is_empty:
                    raise TransferError("what the peer said has another length than it should have")
                yield decode_body(body, message_type)
            if count:
                data = self._take(ALIGNMENT)

    def _take(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        self.fill([memoryview(data)])
        return data

    def fill(self, blocks: Sequence[memoryview]) -> None:
        """Receive until every block is full. Raises ShortReadError."""
        with _timeouts():
            receive_all(self._sock, blocks, socket.MSG_WAITALL)


@contextmanager
def _timeouts() -> Iterator[None]:
    """The kernel's word for a wait that was too long."""
    try:
        yield
    except BlockingIOError as error:
        raise TimeoutError("timed out") from error


def _timeval(seconds: float) -> bytes:
    """What the kernel takes; there 0 is for ever, so nothing else is rounded down to it."""
    microseconds = math.ceil(min(seconds, _MAX_SECONDS) * 1e6)
    return _TIMEVAL.pack(*divmod(microseconds, 1_000_000))
