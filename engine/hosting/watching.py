"""Decides from the progress of its threads whether an engine's process still works. Pure: times and counts are inputs.

The engine's threads count what they finish, and each count is requested through the queue that also carries the
thread's work, so that an idle thread increments its count as well. An answer of one thread proves nothing about the
others: only a count that has changed is a sign of life, and processor time is a sign that the process runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

STEP_LOOP = "step loop"
"""The name of the step loop's count; its steps may take long."""
RANK_CALLS = "loop of calls"
"""The name of the count of a rank of several, whose calls are those steps."""
COMPUTING_FACTOR = 20
_COMPUTING_SHARE = 0.02
"""The share of one core below which a process counts as not computing."""
_STARVED_SHARE = 0.25
"""The share of the time from which on a process that waits for a processor counts as starved."""


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

    def answered(self, counts: Mapping[str, int], now: float) -> None:
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
            is_excused = self._computes(name, count, seconds) or self._is_starved(count, seconds)
            if seconds >= hung * (COMPUTING_FACTOR if is_excused else 1):
                return f"its {name} has made no progress for {seconds:.1f} s"
        return None

    def _computes(self, name: str, count: _Count, seconds: float) -> bool:
        if name not in (STEP_LOOP, RANK_CALLS):
            return False
        return (
            self._nanoseconds is None or self._computed - count.computed >= _COMPUTING_SHARE * seconds * 1e9
        )

    def _is_starved(self, count: _Count, seconds: float) -> bool:
        """Return whether the process waited for a processor for a large part of the time: slowness is no hang then."""
        return self._queued - count.queued >= _STARVED_SHARE * seconds * 1e9
