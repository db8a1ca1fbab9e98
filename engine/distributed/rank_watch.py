"""Detection of ranks whose processes do not run any more, or whose step does not end."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from engine.hosting.watching import (
    RANK_CALLS,
    EngineWatch,
    LivenessTimeouts,
    processor_nanoseconds,
    queued_nanoseconds,
)

logger = logging.getLogger(__name__)
_CHECKS_PER_TIMEOUT = 6


class Watched(Protocol):
    """A rank's process."""

    @property
    def pid(self) -> int:
        """The process id."""

    @property
    def name(self) -> str:
        """A name for messages."""

    @property
    def num_answered(self) -> int:
        """The number of calls that the rank's loop has carried out."""

    @property
    def owes_step(self) -> bool:
        """True while a step runs there, or waits."""

    def kill(self, reason: str) -> None:
        """Kill the process."""


class CallCount:
    """A count of a rank's calls that stands still only while the rank owes a step. Pure."""

    def __init__(self) -> None:
        self._num_rests = 0

    def look(self, num_answered: int, owes_step: bool) -> int:
        """Return the number of calls that were carried out, plus the number of looks at which no step was owed."""
        if not owes_step:
            self._num_rests += 1
        return num_answered + self._num_rests


class RankWatch(threading.Thread):
    """A thread that kills each rank that does not run, or whose step neither ends nor computes.

    A rank that waits for its engine, or for another rank, also runs now and then (``beat``), so running is no sign that its
    step advances. Calls other than steps have time limits of their own (``RanksExecutor``).
    """

    def __init__(
        self,
        ranks: Sequence[Watched],
        timeouts: LivenessTimeouts,
        runtime: Callable[[int], int | None] = processor_nanoseconds,
    ) -> None:
        super().__init__(name="rank-watch", daemon=True)
        self._ranks = ranks
        self._runtime = runtime
        self._interval = min(timeouts.stopped_seconds, timeouts.hung_seconds) / _CHECKS_PER_TIMEOUT
        self._timeouts = timeouts
        self._is_over = threading.Event()

    def stop(self) -> None:
        """End the thread, and wait for its end."""
        self._is_over.set()
        self.join()

    def run(self) -> None:
        """See the class."""
        checked_at = time.monotonic()
        watches = [(rank, EngineWatch(self._timeouts, checked_at), CallCount()) for rank in self._ranks]
        while not self._is_over.wait(self._interval):
            now = time.monotonic()
            for rank, watch, calls in watches:
                if now - checked_at > 2 * self._interval:  # this process did not run itself
                    watch.was_away(now)
                watch.ran(self._runtime(rank.pid), now, queued_nanoseconds(rank.pid))
                watch.on_answer({RANK_CALLS: calls.look(rank.num_answered, rank.owes_step)}, now)
                if (reason := watch.complaint(now)) is not None:
                    logger.error("%s is killed: %s", rank.name, reason)
                    rank.kill(reason)
            checked_at = now


def beat(stopped_seconds: float, is_over: threading.Event) -> threading.Thread:
    """Start a thread in a rank's process that runs often enough to show that the process runs."""

    def run() -> None:
        while not is_over.wait(stopped_seconds / _CHECKS_PER_TIMEOUT / 2):
            pass

    thread = threading.Thread(target=run, name="rank-beat", daemon=True)
    thread.start()
    return thread
