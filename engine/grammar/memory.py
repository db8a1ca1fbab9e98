"""The C heap: measure the bytes in use (the size of a compiled grammar), and return free pages to the system."""

import ctypes
import threading
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
    """Return a function that gives the bytes in use on the C heap by all threads; always 0 if the C library has no count."""
    read = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if read is None:
        return lambda: 0
    read.restype = _Mallinfo2

    def num_bytes() -> int:
        found = read()
        return int(found.uordblks) + int(found.hblkhd)

    return num_bytes


class HeapTrimmer:
    """Returns free pages of the C heap to the system, once for each ``every_bytes`` built. Thread-safe.

    The library builds each grammar in the arena of the thread that compiles it, and glibc returns only the top of an arena.
    A trim took up to 14 ms. Does nothing if the C library has no ``malloc_trim``.
    """

    def __init__(self, every_bytes: int = 2**23) -> None:
        self._trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._every_bytes = every_bytes
        self._lock = threading.Lock()
        self._num_bytes = 0

    def note(self, num_bytes: int) -> None:
        """Record that ``num_bytes`` were built."""
        with self._lock:
            self._num_bytes += num_bytes

    def trim(self) -> bool:
        """Trim the heap if enough was built since the last time. Returns whether it was."""
        with self._lock:
            is_due = self._trim is not None and self._num_bytes >= self._every_bytes
            if is_due:
                self._num_bytes = 0
        if self._trim and is_due:
            self._trim(0)
        return is_due
