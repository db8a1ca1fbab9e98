"""Many blocks of one flat pool into another, without Python code for each block.

By a loop in C of ours (``kv_transfer.native``), which lets go of Python's lock; where that cannot be compiled, by one of
Python's own, which holds the lock for as long as a piece takes.
"""

import ctypes
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kv_transfer.native.compiling import CopyBlocks
from kv_transfer.transports.block_views import BlockViews

_MIN_ADDRESSES = 1024
_ADDRESS_BYTES = ctypes.sizeof(ctypes.c_void_p)
_ID_BYTES = 8


class BlockCopier:
    """Owns two lists of addresses, which serve one read after the other. Used by one thread at a time.

    copy_blocks: None for Python's own loop.
    """

    def __init__(self, copy_blocks: CopyBlocks | None) -> None:
        self._copy_blocks = copy_blocks
        self._from, self._to = _Addresses(), _Addresses()

    def copying(
        self, source: BlockViews, target: BlockViews, *, past_caches: bool
    ) -> Callable[[int, int], None]:
        """What copies the views from a first one to before a last one. Blocks and views of both have one size.

        past_caches: of the processor, where it can: the bytes are not read again soon, or are more than those hold.
        Neither pool is kept alive or exported by it. It is good until the next one is asked for.
        """
        if self._copy_blocks is None:
            items = self._from.items(source)
            targets = self._to.items(target)
            return lambda start, end: _copy_data(targets[start:end], items[start:end])
        copy_blocks = self._copy_blocks
        step = source.block_bytes
        size = source.view_bytes
        out_of = source.first_address
        into = target.first_address
        ids = np.ascontiguousarray(source.ids), np.ascontiguousarray(target.ids)
        out_of_ids, into_ids = (each.__array_interface__["data"][0] for each in ids)

        def copy(start: int, end: int, _kept: object = ids) -> None:
            at = start * _ID_BYTES
            copy_blocks(into, into_ids + at, out_of, out_of_ids + at, end - start, step, size, past_caches)

        return copy


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
_copy_data.restype = ctypes.c_int
_copy_data.argtypes = (ctypes.py_object, ctypes.py_object)


class _Addresses:
    """Owns a list of addresses."""

    def __init__(self) -> None:
        self._addresses: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._view = memoryview(b"")
        self._item_bytes = 0

    def items(self, views: BlockViews) -> memoryview:
        """These, as the items of a buffer (PEP 3118, suboffsets); good until the next call."""
        count = len(views)
        size = views.view_bytes
        if count > len(self._addresses) or size != self._item_bytes:
            self._addresses = np.zeros(max(count, len(self._addresses), _MIN_ADDRESSES), np.int64)
            self._view = _buffer_of(self._addresses, size)
            self._item_bytes = size
        views.put_addresses(self._addresses[:count])
        return self._view


def _buffer_of(addresses: npt.NDArray[np.int64], item_bytes: int) -> memoryview:
    """``addresses`` must be kept as long as this, which follows what they become."""
    count = len(addresses)
    numbers = (ctypes.c_ssize_t * 3)(count, _ADDRESS_BYTES, 0)
    shape = ctypes.addressof(numbers)
    step = ctypes.sizeof(ctypes.c_ssize_t)
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
