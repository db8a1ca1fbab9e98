"""Many blocks of one flat pool into another by a few calls, none of which runs Python code for each block.

Where the blocks lie in runs, at one end at least, each run is one call without Python's lock: pools hand out blocks in
runs as long as they are not worn. Blocks that are scattered at both ends are copied by two lists of addresses, in a loop
in C that holds the lock: for a piece, which takes a fraction of a millisecond.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kv_transfer.transport import BlockViews

_MIN_RUN_BYTES = 2**18
"""Of the runs of a piece, on average: below that, letting the lock go for each costs more than it gives."""
_NUM_LOOKS = 8
Ids = npt.NDArray[np.int64]
_Items = npt.NDArray[np.void]


@dataclass(slots=True)
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
        ids, start = as_ids(views.block_ids), 0 if views.part is None else views.part.start_byte
        return cls(views.pool, address_of(views.pool), views.block_bytes, ids, start, views.view_bytes)

    def may_run(self, start: int, end: int) -> bool:
        """Each is large, or a few looks say that successive blocks may be usual among ``start``..``end`` - 1."""
        if self.num_bytes >= _MIN_RUN_BYTES:
            return True
        ids: list[int] = self.ids[start : min(start + _NUM_LOOKS + 1, end)].tolist()
        return 2 * sum(later - one == 1 for one, later in pairwise(ids)) >= len(ids) - 1

    def run_ends(self, start: int, end: int) -> list[int]:
        """Where the runs of successive blocks among the items ``start``..``end`` - 1 end."""
        breaks = self.ids[start + 1 : end] - self.ids[start : end - 1] != 1
        ends: list[int] = (breaks.nonzero()[0] + (start + 1)).tolist()
        return [*ends, end]

    def of_pool(self) -> _Items:
        """The item of every block of the pool, by block. As long as it is kept, the pool's buffer is exported."""
        shape, kind = (self.pool.nbytes // self.block_bytes,), np.dtype(f"V{self.num_bytes}")
        return np.ndarray(shape, kind, self.pool, self.start, (self.block_bytes,))

    @property
    def addresses(self) -> Ids:
        """Where each item begins."""
        return self.ids * self.block_bytes + (self.address + self.start)


def copying(source: PoolItems, target: PoolItems) -> Callable[[int, int], None]:
    """What copies the items from a first one to before a last one, one at least. Those of both have one size."""
    by_address: Callable[[int, int], None] | None = None

    def copy(start: int, end: int) -> None:
        nonlocal by_address
        max_runs = max(1, (end - start) * source.num_bytes // _MIN_RUN_BYTES)
        if source.may_run(start, end) and len(ends := source.run_ends(start, end)) <= max_runs:
            _copy_from_runs(source, target, start, ends)
        elif (
            source.is_whole
            and target.may_run(start, end)
            and len(ends := target.run_ends(start, end)) <= max_runs
        ):
            _copy_to_runs(source, target, start, ends)
        else:
            by_address = by_address or _by_address(source, target)
            by_address(start, end)

    return copy


def as_ids(block_ids: Sequence[int]) -> Ids:
    """As ``PoolItems`` wants them."""
    return np.fromiter(block_ids, np.int64, len(block_ids))


def address_of(pool: memoryview) -> int:
    """Where a view of memory begins, also one that cannot be written to."""
    address: int = np.frombuffer(pool, np.uint8).__array_interface__["data"][0]
    return address


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


def _by_address(source: PoolItems, target: PoolItems) -> Callable[[int, int], None]:
    out_of, into = _Scattered(source), _Scattered(target)
    return lambda start, end: _copy_data(into.view[start:end], out_of.view[start:end])


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


class _Scattered:
    """Items as one buffer, which is an array of pointers to them (PEP 3118, suboffsets). Keep this as long as ``view``."""

    def __init__(self, items: PoolItems) -> None:
        self._addresses = items.addresses
        count, size = len(self._addresses), items.num_bytes
        numbers = (ctypes.c_ssize_t * 3)(count, ctypes.sizeof(ctypes.c_void_p), 0)
        shape, step = ctypes.addressof(numbers), ctypes.sizeof(ctypes.c_ssize_t)
        buffer = _Buffer(
            buf=self._addresses.__array_interface__["data"][0],
            len=count * size,
            itemsize=size,
            ndim=1,
            format=b"B",
            shape=shape,
            strides=shape + step,
            suboffsets=shape + 2 * step,
        )
        self.view: memoryview = _view_of(buffer)  # it has taken over the numbers, not the addresses
