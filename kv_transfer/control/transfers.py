"""The base of both sides of the control half: one lock, and the calls that wait until it is released."""

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
        """Hold the lock; afterwards make the calls in ``_later``, in order.

        Each call is made whatever the body or an earlier call raised: blocks stay taken until a lease is released or a
        read is stopped. The last exception is raised, with the earlier ones as its context.
        """
        with ExitStack() as calls, self._lock:
            try:
                yield
            finally:
                for call in reversed(self._later):
                    calls.callback(call)
                self._later = []
