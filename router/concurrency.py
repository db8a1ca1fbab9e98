"""Background tasks with an owner, long work that yields to other tasks, and a signal that wakes tasks at a change."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any


class ChangeSignal:
    """Wakes tasks and calls listeners at every change.

    A task takes ``next`` first, then looks at the state, then waits on what it took: then it misses no change. A listener is
    called at once, and must not cause a change itself. More room on a worker, which every answer that ends leaves, is a
    change for the listeners of room only.
    """

    def __init__(self) -> None:
        self.next = asyncio.Event()
        """The event that the next change sets."""
        self._listeners: list[Callable[[], None]] = []
        self._room_listeners: list[Callable[[], None]] = []

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
        # a new event for the next change: a task that took the old one is woken however late it waits on it
        self.next.set()
        self.next = asyncio.Event()
        for on_change in self._listeners:
            on_change()


logger = logging.getLogger(__name__)
_ITEMS_AT_A_TIME = 4


async def rest_after(number: int) -> None:
    """Let the event loop run other tasks after every few items of a loop. number: of the item, from 1."""
    # a request may have thousands of answers, and to begin or to cancel each takes time
    if number % _ITEMS_AT_A_TIME == 0:
        await asyncio.sleep(0)


class TaskSet:
    """Owns the tasks that it has spawned until they are done or ``close`` ends them: none is lost, and none outlives it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run ``work`` in the background. It handles its own errors; one that it raises is a bug and is logged."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    async def close(self, grace_seconds: float) -> None:
        """Wait ``grace_seconds`` for the tasks, then cancel them. None runs when this returns."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=grace_seconds)
        for task in set(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            logger.error("background task %s failed", task.get_name(), exc_info=error)
