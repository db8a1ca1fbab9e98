"""Blocks and frames over a socket on which only the kernel waits.

A piece of a read crosses in one system call at each end (a blocking ``sendmsg`` here, ``MSG_WAITALL`` there), and
Python runs between pieces only. For blocks of a flat pool these calls get lists of addresses that numpy makes:
Python's own functions take a list of views, which costs more than the call for the small blocks of small models.
"""

import ctypes
import errno
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.device_pool import HostParts
from kv_transfer.links.framing import ShortReadError, receive_all, send_all
from kv_transfer.transports.block_views import BlockViews, ReadingViews, view_bytes_of

# Linux's IOV_MAX.
_MAX_VECTORS = 1024
_Vectors = npt.NDArray[np.uint64]
"""[count, 2]: (address, bytes), which is the system's ``struct iovec`` where addresses have 64 bits."""


class SocketBlocks:
    """Blocks that cross a socket in order, by Python's own functions. Raises OSError as the socket does.

    There is at least one, and all have ``view_bytes``.
    """

    def __init__(self, views: Sequence[memoryview], view_bytes: int) -> None:
        self.view_bytes = view_bytes
        self._views = views

    def send(self, sock: socket.socket, frames: bytes, start: int, end: int) -> None:
        """Send ``frames``, then the blocks ``start``..``end`` - 1. Each block is sent once."""
        send_all(sock, [memoryview(frames), *self._views[start:end]])

    def receive(self, sock: socket.socket, frames: bytearray, start: int, end: int) -> None:
        """Fill ``frames``, then the blocks ``start``..``end`` - 1. Raises ShortReadError."""
        views = [memoryview(frames), *self._views[start:end]]
        receive_all(sock, views if frames else views[1:], socket.MSG_WAITALL)


def socket_blocks(views: Sequence[memoryview]) -> SocketBlocks:
    """Return the fastest way for these views on this system: the layout of ``struct msghdr`` below is Linux's."""
    if isinstance(views, ReadingViews):
        return _DeviceBlocks(views, views.view_bytes)
    if not isinstance(views, BlockViews):
        return SocketBlocks(views, view_bytes_of(views))
    if sys.platform == "linux" and sys.maxsize > 2**32:
        return _VectorBlocks(views)
    return SocketBlocks(views, views.view_bytes)


def vectors_after(vectors: _Vectors, count: int) -> _Vectors:
    """Return the vectors of the bytes after the first ``count``, at least one. Changes the vector in which these end."""
    ends = np.cumsum(vectors[:, 1])
    first = int(np.searchsorted(ends, np.uint64(count), side="right"))
    begun = count - (int(ends[first - 1]) if first else 0)
    rest = vectors[first:]
    rest[0, 0] += np.uint64(begun)
    rest[0, 1] -= np.uint64(begun)
    return rest


class _DeviceBlocks(SocketBlocks):
    """Blocks of a device: while a piece is sent, the next one of its size is copied to the host."""

    _views: ReadingViews

    def __init__(self, views: ReadingViews, view_bytes: int) -> None:
        super().__init__(views, view_bytes)
        self._begun: dict[tuple[int, int], HostParts] = {}

    def send(self, sock: socket.socket, frames: bytes, start: int, end: int) -> None:
        """See SocketBlocks."""
        copied = self._begun.pop((start, end), None) or self._views[start:end].begin()
        following = (end, min(2 * end - start, len(self._views)))
        if following[0] < following[1]:
            self._begun[following] = self._views[slice(*following)].begin()
        send_all(sock, [memoryview(frames), *copied.views()])


class _VectorBlocks(SocketBlocks):
    """Blocks by a list of vectors, one for each block after a free one."""

    def __init__(self, views: BlockViews) -> None:
        super().__init__(views, views.view_bytes)  # keeps the pool alive
        self._vectors = np.empty((len(views) + 1, 2), np.uint64)
        views.put_addresses(self._vectors[1:, 0])
        self._vectors[1:, 1] = views.view_bytes

    def send(self, sock: socket.socket, frames: bytes, start: int, end: int) -> None:
        _move(_send, sock, *self._vectors_of(frames, start, end), socket.MSG_NOSIGNAL)

    def receive(self, sock: socket.socket, frames: bytearray, start: int, end: int) -> None:
        _move(_receive, sock, *self._vectors_of(frames, start, end), socket.MSG_WAITALL)

    def _vectors_of(self, frames: bytes | bytearray, start: int, end: int) -> tuple[_Vectors, int]:
        """Return the vectors of the frames, if any, and of the blocks, and their number of bytes.

        The vector of the block before these, which is done, becomes that of the frames.
        """
        num_bytes = (end - start) * self.view_bytes
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


def _move(function: Any, sock: socket.socket, vectors: _Vectors, num_bytes: int, flags: int) -> None:
    """Move all bytes of these vectors, which change if a call ends early. Raises ShortReadError, OSError."""
    left = num_bytes
    while left:
        address = vectors.__array_interface__["data"][0]
        header = _Header(vectors=address, num_vectors=min(len(vectors), _MAX_VECTORS))
        # ctypes releases Python's lock, and a call that a signal has ended is made again.
        while (count := int(function(sock.fileno(), ctypes.addressof(header), flags))) < 0:
            if (code := ctypes.get_errno()) != errno.EINTR:
                raise OSError(code, os.strerror(code))
        if count == 0:
            raise ShortReadError(num_bytes - left, num_bytes)
        left -= count
        if left:
            vectors = vectors_after(vectors, count)
