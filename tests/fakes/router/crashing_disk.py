"""A disk on which the process dies at a chosen write, for tests of recovery."""

from pathlib import Path

from router.batches.folder import Disk


class ProcessDiedError(Exception):
    """The process has been killed at this point."""


class CrashingDisk(Disk):
    """Makes changes until ``crash_at`` is reached, and none afterwards.

    crash_at: how many more changes are made; None for all. A write during which the process dies leaves its first half.
    """

    def __init__(self) -> None:
        self.crash_at: int | None = None

    @property
    def is_dead(self) -> bool:
        """True once the process has died."""
        return self.crash_at is not None and self.crash_at < 0

    def create(self, path: Path) -> int:
        """Open a new file. Raises ProcessDiedError."""
        self._step()
        return super().create(path)

    def append_to(self, path: Path) -> int:
        """Open a file for appending. Raises ProcessDiedError."""
        self._step()
        return super().append_to(path)

    def write(self, descriptor: int, data: bytes) -> None:
        """Write ``data``, or half of it. Raises ProcessDiedError."""
        if self.crash_at == 0:
            super().write(descriptor, data[: len(data) // 2])
        self._step()
        super().write(descriptor, data)

    def sync(self, descriptor: int) -> None:
        """Do nothing, since no power failure is simulated. Raises ProcessDiedError."""
        self._step()

    def truncate(self, path: Path, size: int) -> None:
        """Cut a file. Raises ProcessDiedError."""
        self._step()
        super().truncate(path, size)

    def replace(self, source: Path, target: Path) -> None:
        """Rename a file. Raises ProcessDiedError."""
        self._step()
        super().replace(source, target)

    def remove(self, path: Path) -> None:
        """Remove a file. Raises ProcessDiedError."""
        self._step()
        super().remove(path)

    def sync_folder(self, folder: Path) -> None:
        """Do nothing, since no power failure is simulated. Raises ProcessDiedError."""
        self._step()

    def _step(self) -> None:
        if self.crash_at is not None:
            self.crash_at -= 1
        if self.is_dead:
            raise ProcessDiedError
