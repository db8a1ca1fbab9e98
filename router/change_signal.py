"""One signal for "the workers, their room, or what is known of the model, have changed"."""

import asyncio
from collections.abc import Callable


class ChangeSignal:
    """Take ``next`` first, look at the state, then wait on what was taken: so no change is missed.

    A ``listen``er is called at every change, at once; it must not cause one.
    """

    def __init__(self) -> None:
        self._next = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []

    @property
    def next(self) -> asyncio.Event:
        """An event that the next change sets."""
        return self._next

    def add_listener(self, on_change: Callable[[], None]) -> None:
        """Call ``on_change`` at every change from now on."""
        self._listeners.append(on_change)

    def notify(self) -> None:
        """Something has changed."""
        self._next.set()
        self._next = asyncio.Event()
        for on_change in self._listeners:
            on_change()
