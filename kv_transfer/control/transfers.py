"""What the two sides of the control half share: one lock, and what may be done only after it is let go."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager


class Transfers:
    """State behind ``_lock``. Calls that could take another lock, or block, wait in ``_later`` until it is free."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._later: list[Callable[[], None]] = []

    @contextmanager
    def _acting(self) -> Iterator[None]:
        """Hold the lock; afterwards carry out, in order, what must not happen under it.

        Every act is tried, whatever the body or an earlier act raised: blocks stay taken until a lease is released or
        a read is stopped. The last exception goes on, the ones before it are its context.
        """
        with ExitStack() as acts, self._lock:
            try:
                yield
            finally:
                for act in reversed(self._later):
                    acts.callback(act)
                self._later = []
