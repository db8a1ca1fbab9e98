"""Decides from the progress of its threads, and from its processor time, whether an engine's process still works.

``EngineWatch`` is pure: times and counts are its inputs. The engine's threads count what they finish, and each count is
requested through the queue that also carries the thread's work, so that an idle thread increments its count as well. An
answer of one thread proves nothing about the others: only a count that has changed is a sign of life, and processor time is
a sign that the process runs.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
# A thread or process that ended while it was read, or whose files are empty because of that.
_GONE = (FileNotFoundError, ProcessLookupError, ValueError)
STEP_LOOP = "step loop"
"""The name of the step loop's count; its steps may take long."""
RANK_CALLS = "loop of calls"
"""The name of the count of a rank of several, whose calls are those steps."""
COMPUTING_FACTOR = 20
# The share of one core below which a process counts as not computing.
_COMPUTING_SHARE = 0.02
# The share of the time from which on a process that waits for a processor counts as starved.
_STARVED_SHARE = 0.25


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


@dataclass(frozen=True)
class LivenessTimeouts:
    """The time limits of an engine that shows no sign of life.

    stopped_seconds: without processor time. hung_seconds: without progress of a thread; a step of a process that
    computes, and any thread of a process that other processes keep from the processors, may take ``COMPUTING_FACTOR``
    times as long.
    """

    stopped_seconds: float
    hung_seconds: float


@dataclass
class _Count:
    """A thread's count, the time of its last change, and by then the process's processor time and time in the queue."""

    value: int
    since: float
    computed: int
    queued: int


class EngineWatch:
    """Owns the last signs of life of one engine. now: seconds, monotonic."""

    def __init__(self, timeouts: LivenessTimeouts, now: float) -> None:
        self._timeouts = timeouts
        self._counts: dict[str, _Count] = {}
        self._ran_at = now
        self._answered_at = now
        self._nanoseconds: int | None = None
        self._computed = 0
        self._queued = 0

    def on_answer(self, counts: Mapping[str, int], now: float) -> None:
        """Record the counts that the engine has sent."""
        self._answered_at = now
        for name, value in counts.items():
            known = self._counts.get(name)
            if known is None or known.value != value:
                self._counts[name] = _Count(value, now, self._computed, self._queued)

    def ran(self, nanoseconds: int | None, now: float, queued: int = 0) -> None:
        """Record the process's time on a processor or in the queue for one; None on systems that do not count it.

        queued: the part in the queue.
        """
        self._queued = max(self._queued, queued)  # a sum falls when a thread ends
        before = self._nanoseconds
        self._nanoseconds = nanoseconds
        if nanoseconds is None or before is None or nanoseconds != before:
            self._ran_at = now
        if nanoseconds is not None and before is not None:
            self._computed += max(0, nanoseconds - before)

    def was_away(self, now: float) -> None:
        """Start all time limits again: the watching process itself did not run, so missing signs prove nothing."""
        self._ran_at = self._answered_at = now
        for count in self._counts.values():
            count.since = now
            count.computed = self._computed
            count.queued = self._queued

    def complaint(self, now: float, share: float = 1.0) -> str | None:
        """Return what is wrong, None if nothing. share: the part of a time limit that must have passed."""
        stopped = self._timeouts.stopped_seconds * share
        hung = self._timeouts.hung_seconds * share
        if (seconds := now - self._ran_at) >= stopped:
            return f"its process has not run for {seconds:.1f} s; it may be stopped or frozen"
        if self._nanoseconds is None and (seconds := now - self._answered_at) >= hung:
            return f"its process has not answered for {seconds:.1f} s"
        for name, count in self._counts.items():
            seconds = now - count.since
            # A step may take long while it computes; one that other processes keep from the processors is slow, and no hang.
            has_computed = self._computed - count.computed >= _COMPUTING_SHARE * seconds * 1e9
            computes = name in (STEP_LOOP, RANK_CALLS) and (self._nanoseconds is None or has_computed)
            is_excused = computes or self._queued - count.queued >= _STARVED_SHARE * seconds * 1e9
            if seconds >= hung * (COMPUTING_FACTOR if is_excused else 1):
                return f"its {name} has made no progress for {seconds:.1f} s"
        return None
