"""One signal for changes of the workers, of their room, and of the model."""

import asyncio
from collections.abc import Callable


class ChangeSignal:
    """Wakes tasks and calls listeners at every change.

    A task takes ``next`` first, then looks at the state, then waits on what it took: then it misses no change. A listener is
    called at once, and must not cause a change itself. More room on a worker, which every answer that ends leaves, is a
    change for the listeners of room only.
    """

    def __init__(self) -> None:
        self._next = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []
        self._room_listeners: list[Callable[[], None]] = []

    @property
    def next(self) -> asyncio.Event:
        """The event that the next change sets."""
        return self._next

    def add_listener(self, on_change: Callable[[], None]) -> None:
        """Call ``on_change`` at every change from now on."""
        self._listeners.append(on_change)

    def add_room_listener(self, on_more_room: Callable[[], None]) -> None:
        """Call ``on_more_room`` whenever a worker may have room that it did not have, from now on."""
        self._room_listeners.append(on_more_room)

    def notify_room(self) -> None:
        """Report that a worker may have room that it did not have."""
        for on_more_room in self._room_listeners:
            on_more_room()

    def notify(self) -> None:
        """Report a change of the set of workers, of what they can take at all, or of the model."""
        self._next.set()
        self._next = asyncio.Event()
        for on_change in self._listeners:
            on_change()
