"""The changes that are made to the folder, one method each.

What is told to a client as done has passed ``sync``: the content of an upload, and every record (written aside, synced,
renamed over the old one, then the folder is synced). Result lines are appended by one write each and synced when
their batch ends: they survive the death of the process at any moment, and after a power failure those that are lost
are computed again, since the tail of a result file is checked when it is opened.
"""

import os
from pathlib import Path

_PRIVATE = 0o600


class Disk:
    """Owns nothing. Every method raises OSError."""

    def create(self, path: Path) -> int:
        """Open a new file of this user for writing and return its descriptor. Raises FileExistsError."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, _PRIVATE)

    def append_to(self, path: Path) -> int:
        """Open a file of this user, which may be new, so that every write goes to its end; return its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, _PRIVATE)

    def write(self, descriptor: int, data: bytes) -> None:
        """Write all of ``data``; what was written before an error stays."""
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]

    def sync(self, descriptor: int) -> None:
        """Return when the file's content would survive a power failure."""
        os.fsync(descriptor)

    def truncate(self, path: Path, size: int) -> None:
        """Cut a file to ``size`` bytes."""
        os.truncate(path, size)

    def replace(self, source: Path, target: Path) -> None:
        """Rename ``source``, over ``target`` where it exists."""
        source.replace(target)

    def remove(self, path: Path) -> None:
        """Remove a file; one that does not exist is no error."""
        path.unlink(missing_ok=True)

    def sync_folder(self, folder: Path) -> None:
        """Return when the names in a folder would survive a power failure."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
