"""The processor time of a process and its children, which shows whether it runs at all."""

from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_GONE = (FileNotFoundError, ProcessLookupError, ValueError)
"""A thread or process that ended while it was read, or whose files are empty because of that."""


def processor_nanoseconds(pid: int, proc: Path = _PROC) -> int | None:
    """Return the nanoseconds that the process and its descendants spent on a processor or in the queue for one.

    The sum falls when a thread ends. None where the system does not count (not Linux), or the process is gone. A stopped
    process adds nothing, however it was stopped; one that waits for a processor on a busy machine does.
    """
    if not (proc / str(pid) / "schedstat").exists():
        return None
    return _sum_of(str(pid), proc)


def queued_nanoseconds(pid: int, proc: Path = _PROC) -> int:
    """Return the nanoseconds of ``processor_nanoseconds`` that were spent in the queue; 0 where nothing counts them."""
    return _sum_of(str(pid), proc, is_queued_only=True)


def _sum_of(pid: str, proc: Path, *, is_queued_only: bool = False) -> int:
    total = 0
    with suppress(*_GONE):
        for task in (proc / pid / "task").iterdir():
            with suppress(*_GONE):
                running, queued, _ = (task / "schedstat").read_text().split()
                total += int(queued) + (0 if is_queued_only else int(running))
            with suppress(*_GONE):
                total += sum(
                    _sum_of(child, proc, is_queued_only=is_queued_only)
                    for child in (task / "children").read_text().split()
                )
    return total
