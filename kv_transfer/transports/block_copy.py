"""Many blocks of one flat pool into another, without Python code for each block.

By a loop in C of ours (``kv_transfer.native``), which lets go of Python's lock and writes past the caches; where that cannot
be compiled, by one of Python's own, which holds the lock for as long as a piece takes.
"""

import ctypes
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kv_transfer.native.library import CopyBlocks
from kv_transfer.transport import BlockViews

_MIN_ADDRESSES = 1024
_ADDRESS_BYTES = ctypes.sizeof(ctypes.c_void_p)


class BlockCopier:
    """Owns two lists of addresses, which serve one read after the other. Used by one thread at a time.

    copy_blocks: None for Python's own loop.
    """

    def __init__(self, copy_blocks: CopyBlocks | None) -> None:
        self._copy_blocks = copy_blocks
        self._from, self._to = _Addresses(), _Addresses()

    def copying(self, source: BlockViews, target: BlockViews) -> Callable[[int, int], None]:
        """What copies the views from a first one to before a last one. Those of both have one size.

        Neither pool is kept alive or exported by it. It is good until the next one is asked for.
        """
        out_of, into, size = self._from.put(source), self._to.put(target), source.view_bytes
        copy_blocks = self._copy_blocks
        if copy_blocks is None:
            items, targets = self._from.items(size), self._to.items(size)
            return lambda start, end: _copy_data(targets[start:end], items[start:end])
        return lambda start, end: copy_blocks(
            into + start * _ADDRESS_BYTES, out_of + start * _ADDRESS_BYTES, end - start, size
        )


class _Buffer(ctypes.Structure):
    """``Py_buffer`` of Python's C API."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_view_of = ctypes.pythonapi.PyMemoryView_FromBuffer
_view_of.restype, _view_of.argtypes = ctypes.py_object, (ctypes.POINTER(_Buffer),)
_copy_data = ctypes.pythonapi.PyObject_CopyData  # one memcpy for each item; raises what goes wrong
_copy_data.restype, _copy_data.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.py_object)


class _Addresses:
    """Owns a list of addresses."""

    def __init__(self) -> None:
        self._item_bytes = 0
        self._has_room_for(0)

    def put(self, views: BlockViews) -> int:
        """Where the list of these begins; good until the next call."""
        count = len(views)
        if count > len(self._addresses):
            self._has_room_for(count)
        views.put_addresses(self._addresses[:count])
        return self._begin

    def items(self, item_bytes: int) -> memoryview:
        """What lies at the addresses, as a buffer of so large items (PEP 3118, suboffsets); good as long as the list."""
        if item_bytes != self._item_bytes:
            self._view, self._item_bytes = _buffer_of(self._addresses, item_bytes), item_bytes
        return self._view

    def _has_room_for(self, count: int) -> None:
        self._addresses: npt.NDArray[np.int64] = np.zeros(max(count, _MIN_ADDRESSES), np.int64)
        self._begin: int = self._addresses.__array_interface__["data"][0]
        self._view, self._item_bytes = memoryview(b""), 0


def _buffer_of(addresses: npt.NDArray[np.int64], item_bytes: int) -> memoryview:
    """``addresses`` must be kept as long as this, which follows what they become."""
    count = len(addresses)
    numbers = (ctypes.c_ssize_t * 3)(count, _ADDRESS_BYTES, 0)
    shape, step = ctypes.addressof(numbers), ctypes.sizeof(ctypes.c_ssize_t)
    buffer = _Buffer(
        buf=addresses.__array_interface__["data"][0],
        len=count * item_bytes,
        itemsize=item_bytes,
        ndim=1,
        format=b"B",
        shape=shape,
        strides=shape + step,
        suboffsets=shape + 2 * step,
    )
    view: memoryview = _view_of(buffer)  # it has taken over the numbers, not the addresses
    return view
