"""How much of the machine others took while something was measured, and what the measured processes took."""

import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass
class Use:
    """Seconds that passed, and CPU seconds: of our process trees, and of all others with what a hypervisor took."""

    wall_seconds: float = 0.0
    own_cpu_seconds: float = 0.0
    other_cpu_seconds: float = 0.0

    @property
    def own_cores(self) -> float:
        """How many cores ours kept busy."""
        return self.own_cpu_seconds / self.wall_seconds

    @property
    def other_cores(self) -> float:
        """How many cores others kept busy."""
        return max(0.0, self.other_cpu_seconds) / self.wall_seconds


@contextmanager
def watch_use() -> Iterator[Use]:
    """Fills in a Use at the end. Ours are this process and all that it started."""
    root = psutil.Process().pid
    use, begin = Use(), time.monotonic()
    busy, own = _busy_seconds(), cpu_seconds(tree(root))
    yield use
    use.wall_seconds = time.monotonic() - begin
    use.own_cpu_seconds = cpu_seconds(tree(root)) - own
    use.other_cpu_seconds = _busy_seconds() - busy - use.own_cpu_seconds


def end_on_sigterm() -> None:
    """SIGTERM ends this process as Ctrl-C does: what it started is stopped first."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def cpu_seconds(pids: Iterable[int]) -> float:
    """What these processes have taken so far; those that have ended count nothing."""
    total = 0.0
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system
    return total


def tree(root: int) -> set[int]:
    """A process and all below it; empty where it has ended."""
    try:
        process = psutil.Process(root)
        return {root, *(child.pid for child in process.children(recursive=True))}
    except psutil.NoSuchProcess:
        return set()


def peak_bytes(root: int) -> int:
    """The sum of the most memory that each process of the tree ever had."""
    total = 0
    for pid in tree(root):
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    return total


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice
