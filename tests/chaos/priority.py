"""The priority of processes that start: they go before those that serve, where the user may do that (root).

A worker starts in three seconds of a free core. On two cores that a loaded pool keeps busy it would take half a minute,
and a test would mostly wait for workers to come back.
"""

import os
from contextlib import suppress
from pathlib import Path

_NICE = -5
"""Three times the weight of a process that serves."""
_PROC = Path("/proc")


def hurry(pid: int) -> None:
    """Raise the priority of a process that starts."""
    _set(pid, _NICE)


def calm(pid: int) -> None:
    """Set the usual priority of a process that has started, and of its children."""
    _set(pid, 0)


def _set(pid: int, nice: int) -> None:
    """Set the niceness of all threads of a process and of its descendants."""
    with suppress(OSError):
        for task in (_PROC / str(pid) / "task").iterdir():
            with suppress(OSError):  # it has ended
                os.setpriority(os.PRIO_PROCESS, int(task.name), nice)
                for child in (task / "children").read_text().split():
                    _set(int(child), nice)
