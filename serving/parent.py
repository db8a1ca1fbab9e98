"""Ends a child process when its parent ends for any reason."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Make the kernel kill this process when its parent, ``parent_pid``, ends.

    Linux: prctl(PR_SET_PDEATHSIG, SIGKILL), see prctl(2); the signal is bound to the parent's *thread* that started this
    process. If the parent has ended before the call, which its pid shows, the process exits at once with code 1. Other
    systems have no such call; there only the pid is checked.

    The process also writes to the terminal of its parent whenever it likes: it is no foreground process of the session, and
    ``stty tostop`` would stop it.
    """
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        sys.exit(1)
