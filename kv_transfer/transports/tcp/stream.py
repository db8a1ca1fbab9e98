"""Blocks and frames over a socket on which only the kernel waits.

A piece of a read crosses in one system call at each end (a blocking ``sendmsg`` here, ``MSG_WAITALL`` there), and
Python runs between pieces only. For blocks of a flat pool these calls get lists of addresses that numpy makes:
Python's own functions take a list of views, which costs more than the call for the small blocks of small models.

Per read the receiver sends ReadRequest. For each of its pieces (``ReadRequest.pieces``, which both sides cut alike)
the sender sends an answer, the blocks in order if it is OK, and a second answer: the lease was valid after the last
byte. After an answer that is STALE the sender closes the connection. Closing the connection makes a read terminal on
the receiver's side.

An answer is a DataReply without a message, in a frame of ALIGNMENT bytes. So a receiver takes answers and blocks by
one call, and blocks lie in the stream as in memory: the kernel copies them a tenth faster than at odd offsets
(x86-64).
"""

import ctypes
import errno
import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kv_transfer.links.framing import (
    FrameBuffer,
    ShortReadError,
    decode_body,
    encode_frame,
    receive_all,
    send_all,
)
from kv_transfer.transports.block_views import BlockViews
from kv_transfer.transports.data_handshake import MAX_DATA_FRAME_BYTES, DataStatus, reply_frame

OK_FRAME = reply_frame(DataStatus.OK)
STALE_FRAME = reply_frame(DataStatus.STALE)
"""The answers among blocks: ALIGNMENT bytes each."""
_T = TypeVar("_T")
_P = ParamSpec("_P")
_MAX_VECTORS = 1024
"""Linux's IOV_MAX."""
_Vectors = npt.NDArray[np.uint64]
"""[count, 2]: (address, bytes), which is the system's ``struct iovec`` where addresses have 64 bits."""


class SocketBlocks(Protocol):
    """Blocks that cross a socket in order. Raises OSError as the socket does."""

    def send(self, sock: socket.socket, frames: bytes, start: int, end: int) -> None:
        """Send ``frames``, then the blocks ``start``..``end`` - 1. Each block is sent once."""

    def receive(self, sock: socket.socket, frames: bytearray, start: int, end: int) -> None:
        """Fill ``frames``, then the blocks ``start``..``end`` - 1. Raises ShortReadError."""


def socket_blocks(views: Sequence[memoryview]) -> SocketBlocks:
    """Return the fastest way for these views on this system: the layout of ``struct msghdr`` below is Linux's."""
    if isinstance(views, BlockViews) and sys.platform == "linux" and sys.maxsize > 2**32:
        return _VectorBlocks(views)
    return _ViewBlocks(views)


def vectors_after(vectors: _Vectors, count: int) -> _Vectors:
    """Return the vectors of the bytes after the first ``count``, at least one. Changes the vector in which these end."""
    ends = np.cumsum(vectors[:, 1])
    first = int(np.searchsorted(ends, np.uint64(count), side="right"))
    begun = count - (int(ends[first - 1]) if first else 0)
    rest = vectors[first:]
    rest[0, 0] += np.uint64(begun)
    rest[0, 1] -= np.uint64(begun)
    return rest


class _ViewBlocks:
    """Blocks by Python's own functions."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views

    def send(self, sock: socket.socket, frames: bytes, start: int, end: int) -> None:
        """See SocketBlocks."""
        send_all(sock, [memoryview(frames), *self._views[start:end]])

    def receive(self, sock: socket.socket, frames: bytearray, start: int, end: int) -> None:
        """See SocketBlocks."""
        views = [memoryview(frames), *self._views[start:end]]
        receive_all(sock, views if frames else views[1:], socket.MSG_WAITALL)


class _VectorBlocks:
    """Blocks by a list of vectors, one for each block after a free one."""

    def __init__(self, views: BlockViews) -> None:
        self._views = views  # keeps the pool alive
        self._vectors = np.empty((len(views) + 1, 2), np.uint64)
        views.put_addresses(self._vectors[1:, 0])
        self._vectors[1:, 1] = views.view_bytes

    def send(self, sock: socket.socket, frames: bytes, start: int, end: int) -> None:
        """See SocketBlocks."""
        vectors, left = self._vectors_of(frames, start, end)
        while left:
            count = _call(_send, sock, vectors, socket.MSG_NOSIGNAL)
            left -= count
            vectors = vectors_after(vectors, count) if left else vectors

    def receive(self, sock: socket.socket, frames: bytearray, start: int, end: int) -> None:
        """See SocketBlocks."""
        vectors, wanted = self._vectors_of(frames, start, end)
        left = wanted
        while left:
            count = _call(_receive, sock, vectors, socket.MSG_WAITALL)
            if count == 0:
                raise ShortReadError(wanted - left, wanted)
            left -= count
            vectors = vectors_after(vectors, count) if left else vectors

    def _vectors_of(self, frames: bytes | bytearray, start: int, end: int) -> tuple[_Vectors, int]:
        """Return the vectors of the frames, if any, and of the blocks, and their number of bytes.

        The vector of the block before these, which is done, becomes that of the frames.
        """
        num_bytes = (end - start) * self._views.view_bytes
        if not frames:
            return self._vectors[start + 1 : end + 1], num_bytes
        self._vectors[start] = np.frombuffer(frames, np.uint8).__array_interface__["data"][0], len(frames)
        return self._vectors[start : end + 1], len(frames) + num_bytes


class _Header(ctypes.Structure):
    """Linux's ``struct msghdr``."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("vectors", ctypes.c_void_p),
        ("num_vectors", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


_libc = ctypes.CDLL(None, use_errno=True)
_send = _libc.sendmsg
_receive = _libc.recvmsg
for _function in (_send, _receive):
    _function.restype = ctypes.c_ssize_t
    _function.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int)


def _call(function: Any, sock: socket.socket, vectors: _Vectors, flags: int) -> int:
    """Call without Python's lock, and again after a signal."""
    address = vectors.__array_interface__["data"][0]
    header = _Header(vectors=address, num_vectors=min(len(vectors), _MAX_VECTORS))
    while (count := int(function(sock.fileno(), ctypes.addressof(header), flags))) < 0:
        if (code := ctypes.get_errno()) != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return count


def _in_time(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """Raise TimeoutError where the kernel reports a wait that was too long as a socket that would block."""

    @wraps(method)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return method(*args, **kwargs)
        except BlockingIOError as error:
            raise TimeoutError("timed out") from error

    return call


class DataStream:
    """The bytes of one data connection. One thread uses it; others may shut the socket down.

    Every method raises TimeoutError if no byte passed for as long as ``limit_waits`` allows, OSError for a broken
    connection, TransferError for a malformed message.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._requests = FrameBuffer(MAX_DATA_FRAME_BYTES)
        self._unread: deque[bytes] = deque()

    def send(self, message: Any) -> None:
        """Send a message in a frame."""
        self.send_frames(encode_frame(message, MAX_DATA_FRAME_BYTES))

    @_in_time
    def send_frames(self, frames: bytes) -> None:
        """Send encoded frames."""
        self._sock.sendall(frames)

    @_in_time
    def send_blocks(self, frames: bytes, blocks: SocketBlocks, start: int, end: int) -> None:
        """Send encoded frames, then the blocks ``start``..``end`` - 1."""
        blocks.send(self._sock, frames, start, end)

    def receive_request(self, message_type: type[_T]) -> _T:
        """Receive a message, with all that have arrived in one call: for streams that carry nothing but frames."""
        while not self._unread:
            data = self._sock.recv(MAX_DATA_FRAME_BYTES)
            if not data:
                raise ShortReadError(0, 1)
            self._unread.extend(self._requests.feed(data))
        return decode_body(self._unread.popleft(), message_type)

    @_in_time
    def receive_bytes(self, num_bytes: int) -> bytearray:
        """Receive so many bytes. Raises ShortReadError."""
        data = bytearray(num_bytes)
        receive_all(self._sock, [memoryview(data)], socket.MSG_WAITALL)
        return data

    @_in_time
    def receive_blocks(self, frames: bytearray, blocks: SocketBlocks, start: int, end: int) -> None:
        """Receive until ``frames``, then the blocks ``start``..``end`` - 1 are full. Raises ShortReadError."""
        blocks.receive(self._sock, frames, start, end)
