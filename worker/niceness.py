"""The scheduling priority of a worker against other processes on the same cores."""

import os
import time
from contextlib import suppress
from pathlib import Path

_GROUP = Path("/proc/self/autogroup")
_TRIES = 20
_PAUSE_SECONDS = 0.1


def set_niceness(nice: int) -> None:
    """Lower the priority of this thread and of what it starts later by ``nice``, as nice(1) does; 0 changes nothing.

    Linux may weigh whole sessions against each other, and apply niceness only within a session (autogroup in sched(7)): a
    session that consists of this process is lowered as a whole. Does nothing on systems without niceness.
    """
    if not nice or not hasattr(os, "nice"):
        return
    os.nice(nice)
    if os.getsid(0) == os.getpid():
        with suppress(OSError):
            _weigh_session(nice)


def _weigh_session(nice: int) -> None:
    """Set the niceness of this session. Linux accepts one change per 0.1 s over all processes, except from root."""
    for _ in range(_TRIES):
        with suppress(BlockingIOError):
            _GROUP.write_text(str(nice))
            return
        time.sleep(_PAUSE_SECONDS)
