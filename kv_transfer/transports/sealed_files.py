"""Files in memory that others may map, and that nobody but their maker can change."""

import fcntl
import os

_F_SEAL_FUTURE_WRITE = 0x10
"""Linux: no new writable mapping of the file and no write() to it, for anybody; what is mapped stays writable."""


def seal(memfd: int) -> None:
    """From now on nobody can resize the file, and nobody but who has mapped it already can write to it.

    Raises OSError where the file was made without sealing, or the system cannot do it.
    """
    fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE)


def reopen_read_only(memfd: int) -> int:
    """A descriptor of the same file that cannot write."""
    return os.open(f"/proc/self/fd/{memfd}", os.O_RDONLY | os.O_CLOEXEC)
