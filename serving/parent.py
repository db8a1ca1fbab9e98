"""A child process that does not outlive its parent, whatever ends the parent."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when the process ``parent_pid``, which started it, ends.

    Linux: prctl(PR_SET_PDEATHSIG, SIGKILL), see prctl(2); the signal follows the parent's *thread* that started us.
    A parent that ended before the call is noticed by its pid: then this exits at once with code 1. Elsewhere there
    is no such call: only that check is made.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        sys.exit(1)
