"""Copies many blocks of one flat pool into another, without Python code for each block.

It uses a loop in C of ours (``kv_transfer.native``), which releases Python's lock; where that cannot be compiled, a loop of
Python's own, which holds the lock for as long as a piece takes.
"""

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kv_transfer.native.compiling import CopyBlocks
from kv_transfer.protocol.reads import Read, blocks_per_piece
from kv_transfer.transports.block_views import BlockViews

_LARGE_BYTES = 2**18
_MIN_ADDRESSES = 1024
Copy = Callable[[int, int], None]
"""Copies the views from a first one to before a last one."""
_ADDRESS_BYTES = ctypes.sizeof(ctypes.c_void_p)
_ID_BYTES = 8


class BlockCopier:
    """Owns two lists of addresses, which are used by one read after another. Used by one thread at a time.

    copy_blocks: None for Python's own loop.
    """

    def __init__(self, copy_blocks: CopyBlocks | None) -> None:
        self._copy_blocks = copy_blocks
        self._from, self._to = _Addresses(), _Addresses()

    def copying(self, source: BlockViews, target: BlockViews, *, past_caches: bool) -> Copy:
        """Return a copy of ``source`` to ``target``, valid until the next call. Blocks and views of both have one size.

        past_caches: write past the processor's caches if it can: the bytes are not read again soon, or do not fit.
        The copy neither keeps a pool alive nor exports its memory.
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


class PieceCopier:
    """Copies the pieces of a read, by one call where both ends are pools. Used by one thread at a time.

    copy_blocks: see ``BlockCopier``. cache_bytes: the size of the processor's last cache.
    """

    def __init__(self, copy_blocks: CopyBlocks | None, cache_bytes: int) -> None:
        self._copier = BlockCopier(copy_blocks)
        self._holds_lock = copy_blocks is None
        self._cache_bytes = cache_bytes

    def copying(self, blocks: BlockViews, views: Sequence[memoryview], read: Read) -> Copy:
        """Return a copy of ``blocks`` to ``views``, valid until the next call. It raises ReadStoppedError."""
        is_long = self._holds_lock and blocks.view_bytes >= _LARGE_BYTES
        if not isinstance(views, BlockViews) or is_long:
            return _copying_each(blocks, views, read)
        past_caches = self._exceeds_caches(blocks.view_bytes, len(blocks), read)
        copy_all = self._copier.copying(blocks, views, past_caches=past_caches)

        def copy_piece(start: int, end: int) -> None:
            read.check()
            copy_all(start, end)

        return copy_piece

    def _exceeds_caches(self, view_bytes: int, num_views: int, read: Read) -> bool:
        """Test if the caches cannot hold both copies of the bytes until they are read again."""
        num_at_once = min(num_views, blocks_per_piece(view_bytes)) if read.is_followed else num_views
        return 2 * num_at_once * view_bytes > self._cache_bytes


def _copying_each(blocks: BlockViews, views: Sequence[memoryview], read: Read) -> Copy:
    copy = _copy_unlocked if blocks.view_bytes >= _LARGE_BYTES else _copy_locked

    def copy_each(start: int, end: int) -> None:
        for number in range(start, end):
            read.check()
            copy(blocks[number], views[number])  # no name keeps a view of the pool in an error's frames

    return copy_each


def _copy_locked(block: memoryview, view: memoryview) -> None:
    view[:] = block


def _copy_unlocked(block: memoryview, view: memoryview) -> None:
    np.copyto(np.frombuffer(view, np.uint8), np.frombuffer(block, np.uint8))


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
    """Owns a list of addresses, which grows as needed."""

    def __init__(self) -> None:
        self._addresses: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._view = memoryview(b"")
        self._item_bytes = 0

    def items(self, views: BlockViews) -> memoryview:
        """Return the views as the items of a buffer (PEP 3118, suboffsets), valid until the next call."""
        count = len(views)
        size = views.view_bytes
        if count > len(self._addresses) or size != self._item_bytes:
            self._addresses = np.zeros(max(count, len(self._addresses), _MIN_ADDRESSES), np.int64)
            self._view = _buffer_of(self._addresses, size)
            self._item_bytes = size
        views.put_addresses(self._addresses[:count])
        return self._view


def _buffer_of(addresses: npt.NDArray[np.int64], item_bytes: int) -> memoryview:
    """Return the buffer whose items are at ``addresses``, which must outlive it and may change."""
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
