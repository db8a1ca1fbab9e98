"""The C heap: how much is in use, by which the size of a compiled grammar is measured, and how free pages are given back."""

import ctypes
import threading
import time
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


class HeapTrimmer:
    """Gives the free pages of the C heap back to the system, at most once in ``period_seconds``. Thread-safe.

    The library builds each grammar in the arena of the thread that compiles it, and glibc returns only the top of an arena.
    A trim took up to 14 ms. Does nothing where the C library has no ``malloc_trim``.
    """

    def __init__(self, period_seconds: float = 0.2, clock: Callable[[], float] = time.monotonic) -> None:
        self._trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._period_seconds = period_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._due_at = clock()

    def trim(self) -> bool:
        """Trim the heap if it is time. Returns whether it was."""
        with self._lock:
            now = self._clock()
            if self._trim is None or now < self._due_at:
                return False
            self._due_at = now + self._period_seconds
        self._trim(0)
        return True
