"""Background tasks with an owner: none is lost, and none outlives its owner. Long work yields to other tasks."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Any, TypeVar

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_AT_ONCE = 4


async def cooperatively(items: Iterable[_T]) -> AsyncIterator[_T]:
    """Yield the items; after every few of them whatever else the event loop has to do is done first."""
    for number, item in enumerate(items, 1):
        yield item
        if number % _AT_ONCE == 0:
            await asyncio.sleep(0)


class TaskSet:
    """Owns the tasks that it has spawned, until they are done or ``close`` ends them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run ``work`` in the background. It handles its own errors; one that escapes is a bug and is logged."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    async def close(self, patience_seconds: float) -> None:
        """Let the tasks end by themselves for a while, then cancel them. None runs when this returns."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=patience_seconds)
        for task in set(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            logger.error("background task %s failed", task.get_name(), exc_info=error)
