"""How far a worker gives way to other processes on the same cores."""

import os
import time
from contextlib import suppress
from pathlib import Path

_GROUP = Path("/proc/self/autogroup")
_TRIES = 20
_PAUSE_SECONDS = 0.1


def give_way(nice: int) -> None:
    """Lower this thread's priority, and that of what it starts from now on, as nice(1) counts it; 0 changes nothing.

    Linux may weigh sessions against each other, and niceness only within one (autogroup in sched(7)); a session that is this
    process's own is made to give way as a whole. Systems that know no niceness do nothing.
    """
    if not nice or not hasattr(os, "nice"):
        return
    os.nice(nice)
    if os.getsid(0) == os.getpid():
        with suppress(OSError):
            _weigh_session(nice)


def _weigh_session(nice: int) -> None:
    """Linux takes one such wish in a tenth of a second, from whichever process; root is not kept waiting."""
    for _ in range(_TRIES):
        with suppress(BlockingIOError):
            _GROUP.write_text(str(nice))
            return
        time.sleep(_PAUSE_SECONDS)
