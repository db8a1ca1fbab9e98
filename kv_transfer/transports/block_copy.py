"""Many blocks of one flat pool into another by a few calls, none of which runs Python code for each block.

Where the blocks lie in runs, at one end at least, each run is one call without Python's lock: pools hand out blocks in
runs as long as they are not worn. Blocks that are scattered at both ends are copied by two lists of addresses, in a loop
in C that holds the lock: for a piece, which takes a fraction of a millisecond.
"""

import ctypes
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kv_transfer.transport import BlockViews, put_addresses

_MIN_RUN_BYTES = 2**18
"""Of the runs of a piece, on average: below that, letting the lock go for each costs more than it gives."""
_MIN_ADDRESSES = 1024
Ids = npt.NDArray[np.int64]
_Items = npt.NDArray[np.void]


@dataclass
class PoolItems:
    """The bytes ``start``..``start + num_bytes`` - 1 of the blocks ``ids`` of a flat pool that begins at ``address``.

    They must be in the pool, which is neither kept alive nor exported by this.
    """

    pool: memoryview
    address: int
    block_bytes: int
    ids: Ids
    start: int
    num_bytes: int

    @property
    def is_whole(self) -> bool:
        """All of each block, so that the items of successive blocks touch."""
        return self.num_bytes == self.block_bytes

    @classmethod
    def of(cls, views: BlockViews) -> "PoolItems":
        """What these views show."""
        start = 0 if views.part is None else views.part.start_byte
        return cls(views.pool, views.address, views.block_bytes, views.ids, start, views.view_bytes)

    def runs(self) -> "Runs | None":
        """The runs of successive blocks; None where two looks show none, or they are too short to be worth a call each."""
        ids, middle = self.ids, len(self.ids) // 2
        if len(ids) > 1 and ids.item(0) + 1 != ids.item(1) and ids.item(middle - 1) + 1 != ids.item(middle):
            return None
        starts = (ids[1:] - ids[:-1] != 1).nonzero()[0]
        if len(starts) * _MIN_RUN_BYTES > 2 * len(ids) * self.num_bytes:
            return None
        return Runs((starts + 1).tolist(), self.num_bytes)

    def of_pool(self) -> _Items:
        """The item of every block of the pool, by block. As long as it is kept, the pool's buffer is exported."""
        shape, kind = (self.pool.nbytes // self.block_bytes,), np.dtype(f"V{self.num_bytes}")
        return np.ndarray(shape, kind, self.pool, self.start, (self.block_bytes,))


@dataclass
class Runs:
    """starts: at which items a run of successive blocks begins, but for the first one; ``num_bytes`` each item."""

    starts: list[int]
    num_bytes: int

    def ends(self, start: int, end: int) -> list[int] | None:
        """Where those among the items ``start``..``end`` - 1 end; None where they are too many for a call each."""
        first, last = bisect_right(self.starts, start), bisect_left(self.starts, end)
        if last - first >= max(1, (end - start) * self.num_bytes // _MIN_RUN_BYTES):
            return None
        return [*self.starts[first:last], end]


class BlockCopier:
    """Owns two lists of addresses, which serve one read after the other. Used by one thread at a time."""

    def __init__(self) -> None:
        self._from, self._to = _Addresses(), _Addresses()

    def copying(self, source: PoolItems, target: PoolItems) -> Callable[[int, int], None]:
        """What copies the items from a first one to before a last one, one at least. Those of both have one size.

        It is good until the next one is asked for.
        """
        from_runs, to_runs = source.runs(), target.runs() if source.is_whole else None
        by_address: Callable[[int, int], None] | None = None
        if from_runs is to_runs is None:
            return self._by_address(source, target)

        def copy(start: int, end: int) -> None:
            nonlocal by_address
            if from_runs is not None and (ends := from_runs.ends(start, end)) is not None:
                _copy_from_runs(source, target, start, ends)
            elif to_runs is not None and (ends := to_runs.ends(start, end)) is not None:
                _copy_to_runs(source, target, start, ends)
            else:
                by_address = by_address or self._by_address(source, target)
                by_address(start, end)

        return copy

    def _by_address(self, source: PoolItems, target: PoolItems) -> Callable[[int, int], None]:
        out_of, into = self._from.items(source), self._to.items(target)
        return lambda start, end: _copy_data(into[start:end], out_of[start:end])


def _copy_from_runs(source: PoolItems, target: PoolItems, start: int, ends: list[int]) -> None:
    out_of, into = source.of_pool(), target.of_pool()
    for stop in ends:
        into[target.ids[start:stop]] = out_of[source.ids[start] : source.ids[stop - 1] + 1]
        start = stop


def _copy_to_runs(source: PoolItems, target: PoolItems, start: int, ends: list[int]) -> None:
    """np.take() copies a whole pool first, unless its items touch."""
    out_of, into = source.of_pool(), target.of_pool()
    for stop in ends:
        run = into[target.ids[start] : target.ids[stop - 1] + 1]
        np.take(out_of, source.ids[start:stop], out=run, mode="clip")
        start = stop


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
    """Owns a list of addresses, and the buffer whose items lie there (PEP 3118, suboffsets)."""

    def __init__(self) -> None:
        self._addresses: Ids = np.zeros(0, np.int64)
        self._view, self._item_bytes = memoryview(b""), 0

    def items(self, items: PoolItems) -> memoryview:
        """The items themselves; good until the next call."""
        count = len(items.ids)
        if count > len(self._addresses) or items.num_bytes != self._item_bytes:
            self._addresses = np.zeros(max(count, len(self._addresses), _MIN_ADDRESSES), np.int64)
            self._view, self._item_bytes = _buffer_of(self._addresses, items.num_bytes), items.num_bytes
        begin = items.address + items.start
        put_addresses(self._addresses[:count], items.ids, items.block_bytes, begin)
        return self._view


def _buffer_of(addresses: Ids, item_bytes: int) -> memoryview:
    """``addresses`` must be kept as long as this, which follows what they become."""
    count = len(addresses)
    numbers = (ctypes.c_ssize_t * 3)(count, ctypes.sizeof(ctypes.c_void_p), 0)
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
