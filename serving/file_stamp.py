"""Detects changes of a file."""

from pathlib import Path

Stamp = tuple[int, ...] | None


def stamp_of(file: Path) -> Stamp:
    """Return a value that changes with the file (with a link's target); None if the file does not exist."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino
