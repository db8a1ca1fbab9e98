"""Background tasks with an owner, and long work that yields to other tasks."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Any, TypeVar

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_ITEMS_AT_A_TIME = 4


async def cooperatively(items: Iterable[_T]) -> AsyncIterator[_T]:
    """Yield the items, and after every few of them let the event loop run other tasks."""
    for number, item in enumerate(items, 1):
        yield item
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
