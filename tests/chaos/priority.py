"""The priority of processes that start: they go before those that serve, where the user may do that (root).

A worker starts in three seconds of a free core. On two cores that a loaded pool keeps busy it would take half a minute,
and a test would mostly wait for workers to come back.
"""

import os
from contextlib import suppress
from pathlib import Path

_NICE = -5
"""Three times the weight of a process that serves."""


def hurry(pid: int) -> None:
    """Raise the priority of a process that starts."""
    _set(pid, _NICE)


def calm(pid: int) -> None:
    """Set the usual priority of a process that has started, and of its children."""
    _set(pid, 0)


def _set(pid: int, nice: int) -> None:
    """Set the niceness of the session that a process leads; where Linux weighs sessions, that of the session too."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PGRP, pid, nice)
        Path(f"/proc/{pid}/autogroup").write_text(str(nice), encoding="ascii")
