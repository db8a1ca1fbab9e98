"""The changes of the folder, one method each.

The content of an upload and every record are synced before a client gets an answer about them; a record is written to a
temporary file, synced, and renamed over the old one, then the folder is synced. Result lines are appended with one write
each and synced when their batch ends. They survive the death of the process at any moment. Lines that a power failure loses
are computed again, since the tail of a result file is checked when it is opened.
"""

import os
from pathlib import Path

_PRIVATE = 0o600


class Disk:
    """The operating system's file operations. Every method raises OSError."""

    def create(self, path: Path) -> int:
        """Open a new file of this user for writing and return its descriptor. Raises FileExistsError."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, _PRIVATE)

    def append_to(self, path: Path) -> int:
        """Open a file of this user, or create it, for appending, and return its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, _PRIVATE)

    def write(self, descriptor: int, data: bytes) -> None:
        """Write all of ``data``. After an error a part of it may have been written."""
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]

    def sync(self, descriptor: int) -> None:
        """Wait until the file's content would survive a power failure."""
        os.fsync(descriptor)

    def truncate(self, path: Path, size: int) -> None:
        """Cut a file to ``size`` bytes."""
        os.truncate(path, size)

    def replace(self, source: Path, target: Path) -> None:
        """Rename ``source`` to ``target``, replacing it."""
        source.replace(target)

    def remove(self, path: Path) -> None:
        """Remove a file, if it exists."""
        path.unlink(missing_ok=True)

    def sync_folder(self, folder: Path) -> None:
        """Wait until the names in a folder would survive a power failure."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
