"""Whether a file has changed since it was read."""

from pathlib import Path

Stamp = tuple[int, ...] | None


def stamp_of(file: Path) -> Stamp:
    """What changes with a file, of the file itself where the path is a link; None where there is none."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino
