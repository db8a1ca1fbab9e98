"""A data connection's bytes: frames and blocks over a socket on which the kernel alone waits.

A piece of a read crosses in one system call at each end (a blocking ``sendmsg`` here, ``MSG_WAITALL`` there), and Python
runs between pieces only: it neither waits itself nor cuts its list of buffers anew after every few kilobytes.
"""

import math
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from kv_transfer.framing import encode_frame, read_frame, receive_all, send_all
from kv_transfer.transports.tcp_wire import MAX_DATA_FRAME_BYTES

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

    def wait_at_most(self, receive_seconds: float, send_seconds: float) -> None:
        """Bound every wait for the peer from now on; 0 waits for ever."""
        self._sock.settimeout(None)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(receive_seconds))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(send_seconds))

    def say(self, message: Any, blocks: Sequence[memoryview] = ()) -> None:
        """Send a frame, and the bytes of ``blocks`` behind it."""
        frame = memoryview(encode_frame(message, MAX_DATA_FRAME_BYTES))
        with _timeouts():
            send_all(self._sock, [frame, *blocks])

    def hear(self, message_type: type[_T]) -> _T:
        """Receive a frame. Raises TransferError for a closed, oversized or malformed one."""
        with _timeouts():
            return read_frame(self._sock, message_type, MAX_DATA_FRAME_BYTES)

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
