"""What the two desks of the control half share: one lock, and what may be done only after it is let go."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Desk:
    """State behind ``_lock``. Calls that could take another lock, or block, wait in ``_later`` until it is free."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._later: list[Callable[[], None]] = []

    @contextmanager
    def _acting(self) -> Iterator[None]:
        """Hold the lock; afterwards carry out what must not happen under it."""
        with self._lock:
            yield
            later, self._later = self._later, []
        for act in later:
            act()
