"""Measures the CPU time of the measured processes and of all others during a measurement."""

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
    """Elapsed seconds, and CPU seconds of our process trees and of all others, including the hypervisor."""

    wall_seconds: float = 0.0
    own_cpu_seconds: float = 0.0
    other_cpu_seconds: float = 0.0

    @property
    def own_cores(self) -> float:
        """The average number of cores that our processes used."""
        return self.own_cpu_seconds / self.wall_seconds

    @property
    def other_cores(self) -> float:
        """The average number of cores that other processes used."""
        return max(0.0, self.other_cpu_seconds) / self.wall_seconds


@contextmanager
def watch_use() -> Iterator[Use]:
    """Yield a Use that is filled in at the end. Ours are this process and its descendants."""
    root = psutil.Process().pid
    use = Use()
    begin = time.monotonic()
    busy = _busy_seconds()
    own = cpu_seconds(tree(root))
    yield use
    use.wall_seconds = time.monotonic() - begin
    use.own_cpu_seconds = cpu_seconds(tree(root)) - own
    use.other_cpu_seconds = _busy_seconds() - busy - use.own_cpu_seconds


def end_on_sigterm() -> None:
    """Make SIGTERM end this process like Ctrl-C, after it has stopped its children."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU seconds of these processes so far, without those that have ended."""
    total = 0.0
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system
    return total


def tree(root: int) -> set[int]:
    """Return a process and its descendants; empty if it has ended."""
    try:
        process = psutil.Process(root)
        return {root, *(child.pid for child in process.children(recursive=True))}
    except psutil.NoSuchProcess:
        return set()


def peak_bytes(root: int) -> int:
    """Return the sum of the peak memory of all processes of the tree."""
    total = 0
    for pid in tree(root):
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    return total


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice
