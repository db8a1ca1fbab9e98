"""Temporary folders and child processes, which do not stay behind when their process is killed.

The next process of the same user removes the folders, and the kernel ends the children. A folder belongs to the process that
holds a lock on it (flock(2)). The kernel releases the lock when the process ends, also after SIGKILL, and no process that it
starts inherits the lock: a folder whose lock is free has no owner any more.
"""

import ctypes
import fcntl
import os
import shutil
import signal
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

_PR_SET_PDEATHSIG = 1
_PREFIX = "kvbaton-{}-"


class RunFolder:
    """A new folder (0700) in the system's temporary folder, or ``within``, until ``close``. May be used as a block.

    kind: the same for all folders of one purpose; those of ended processes are removed before. Raises OSError.
    """

    def __init__(self, kind: str, within: Path | None = None) -> None:
        remove_stale(kind, within)
        while True:
            path = Path(tempfile.mkdtemp(prefix=_PREFIX.format(kind), dir=within))
            lock = _locked(path)
            if lock is not None:
                break
            # Another process took the new folder for one without an owner, in the moment before it had its lock.
        self.path = path
        self._lock = lock

    def close(self) -> None:
        """Remove the folder with its content. Does nothing the second time."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def remove_stale(kind: str, within: Path | None = None) -> None:
    """Remove the folders of this kind, see ``RunFolder``, whose processes have ended."""
    base = Path(tempfile.gettempdir() if within is None else within)
    for path in base.glob(f"{_PREFIX.format(kind)}*"):
        with suppress(OSError):
            info = path.lstat()
            if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
                continue
            if (lock := _locked(path)) is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _locked(path: Path) -> int | None:
    """Return a descriptor that holds the folder's lock; None if another process has it, or has removed the folder."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Its last owner may have removed the folder between the opening and the lock, and another one made it anew.
        if os.fstat(descriptor).st_ino == path.lstat().st_ino:
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None


def die_with_parent(parent_pid: int) -> None:
    """Make the kernel kill this process when its parent, ``parent_pid``, ends.

    Linux: prctl(PR_SET_PDEATHSIG, SIGKILL), see prctl(2); the signal is bound to the parent's *thread* that started this
    process. If the parent has ended before the call, which its pid shows, the process exits at once with code 1. Other
    systems have no such call; there only the pid is checked.
    """
    # It writes to its parent's terminal, but is no foreground process of the session: ``stty tostop`` would stop it.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The parent may have ended before the call above: then no signal comes.
    if os.getppid() != parent_pid:
        sys.exit(1)
