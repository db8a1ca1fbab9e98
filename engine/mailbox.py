"""A queue with one reader. ``queue.SimpleQueue`` would do, but for a fault in its time limit.

Its ``get(timeout=...)`` waits for ever if the time has passed before it starts to wait (CPython 3.7 to 3.13 at least: the
rest of the time is negative then, which its lock takes for no limit). A thread that is delayed there, by other
processes or a stop, never continues: with a time limit of 0.2 ms that happened about once in a thousand runs of a loaded
machine.
"""

import threading
import time
from collections import deque
from contextlib import suppress
from queue import Empty
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Mailbox(Generic[_T]):
    """Any thread puts, one thread gets; first in, first out."""

    def __init__(self) -> None:
        self._items: deque[_T] = deque()
        # Unlocked when an item may have come since the last look of ``get``.
        self._bell = threading.Lock()

    @property
    def num_waiting(self) -> int:
        """Items that ``get`` would return without waiting."""
        return len(self._items)

    def put(self, item: _T) -> None:
        """Add an item, without blocking."""
        self._items.append(item)
        if self._bell.locked():
            with suppress(RuntimeError):  # another thread has opened it meanwhile
                self._bell.release()

    def get(self, timeout_seconds: float | None = None) -> _T:
        """Return the first item; wait if there is none. Raises ``queue.Empty`` after ``timeout_seconds`` (0: at once)."""
        if not self._items:
            self._wait(timeout_seconds)
        return self._items.popleft()

    def _wait(self, timeout_seconds: float | None) -> None:
        if timeout_seconds is None:
            while not self._items:
                self._bell.acquire()
            return
        end = time.monotonic() + timeout_seconds
        while not self._items:
            has_rung = self._bell.acquire(timeout=max(0.0, end - time.monotonic()))
            if not (has_rung or self._items):
                raise Empty
