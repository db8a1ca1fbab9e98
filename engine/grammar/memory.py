"""What the C heap holds, by which the size of a compiled grammar is measured."""

import ctypes
from collections.abc import Callable

HeapMeter = Callable[[], int]


class _Mallinfo2(ctypes.Structure):
    """``struct mallinfo2`` of glibc (malloc.h)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def heap_meter() -> HeapMeter:
    """A function that returns the bytes in use on the C heap, of all threads; always 0 where the C library has no count."""
    read = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if read is None:
        return lambda: 0
    read.restype = _Mallinfo2

    def num_bytes() -> int:
        found = read()
        return int(found.uordblks) + int(found.hblkhd)

    return num_bytes
