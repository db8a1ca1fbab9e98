"""Processes that are being stopped, in the order in which they depend on each other."""

import asyncio
from collections.abc import Collection

from launch.kept_process import KeptProcess


class StoppingProcesses:
    """Owns the tasks that stop processes, by the process's name."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def task_of(self, name: str) -> asyncio.Task[None] | None:
        """Return the task that ends when the earlier process of this name has ended; None if there is none."""
        return self._tasks.get(name)

    def stop(
        self, processes: Collection[KeptProcess], at_once: asyncio.Event | None
    ) -> set[asyncio.Task[None]]:
        """Stop the processes, first those that others of them need; return the tasks, which end with them.

        at_once: when it is set, the processes abandon their work.
        """
        for process in processes:
            process.release()
        needed = {name for process in processes for name in process.spec.needs}
        first = {
            self._stop_after(process, set(), at_once) for process in processes if process.spec.name in needed
        }
        others = {
            self._stop_after(process, first, at_once)
            for process in processes
            if process.spec.name not in needed
        }
        return first | others

    async def wait(self) -> None:
        """Block until all have ended, and raise the error of one that failed."""
        await wait_for(set(self._tasks.values()))

    def _stop_after(
        self, process: KeptProcess, first: set[asyncio.Task[None]], at_once: asyncio.Event | None
    ) -> asyncio.Task[None]:
        name = process.spec.name
        earlier = {self._tasks[name]} if name in self._tasks else set()
        task = asyncio.create_task(_stop(process, first | earlier, at_once), name=f"stop {name}")
        self._tasks[name] = task
        task.add_done_callback(lambda _: self._forget(name, task))
        return task

    def _forget(self, name: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(name) is task:
            del self._tasks[name]


async def _stop(process: KeptProcess, first: set[asyncio.Task[None]], at_once: asyncio.Event | None) -> None:
    """Stop a process when the tasks of ``first`` have ended."""
    if first:
        await asyncio.wait(first)
    await process.stop(at_once)


async def wait_for(ended: set[asyncio.Task[None]]) -> None:
    """Block until all tasks have ended, and raise the error of one; they continue if the caller is cancelled."""
    if ended:
        await asyncio.wait(ended)
    for task in ended:
        task.result()
