"""Folders in the system's temporary one that do not outlive their process, even if it is killed."""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path


class HeldFolder:
    """A new folder (0700) that this process has locked until ``remove``.

    The kernel unlocks the folder of a process that was killed, and the next one with the same prefix removes it.
    """

    def __init__(self, prefix: str) -> None:
        for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            _remove_if_free(path)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix))
            if (lock := _locked(self.path)) is None:
                continue  # another process has just removed it
            if self.path.exists():
                break
            os.close(lock)
        self._lock: int | None = lock

    def remove(self) -> None:
        """Remove the folder with its content. Idempotent."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def _locked(path: Path) -> int | None:
    """Lock a folder of this user, and return its descriptor; None if it is locked, another's, or gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


def _remove_if_free(path: Path) -> None:
    if (lock := _locked(path)) is not None:
        with suppress(OSError):
            shutil.rmtree(path)
        os.close(lock)
