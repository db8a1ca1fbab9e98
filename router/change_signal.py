"""One signal for changes of the workers, of their room, and of the model."""

import asyncio
from collections.abc import Callable


class ChangeSignal:
    """Wakes tasks and calls listeners at every change.

    A task takes ``next`` first, then looks at the state, then waits on what it took: then it misses no change. A listener is
    called at once, and must not cause a change itself.
    """

    def __init__(self) -> None:
        self._next = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []

    @property
    def next(self) -> asyncio.Event:
        """The event that the next change sets."""
        return self._next

    def add_listener(self, on_change: Callable[[], None]) -> None:
        """Call ``on_change`` at every change from now on."""
        self._listeners.append(on_change)

    def notify(self) -> None:
        """Report a change."""
        self._next.set()
        self._next = asyncio.Event()
        for on_change in self._listeners:
            on_change()
