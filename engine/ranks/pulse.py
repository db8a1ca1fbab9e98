"""Finds ranks whose processes do not run any more, between steps as well as within one."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from engine.hosting.watching import EngineWatch, Patience
from engine.processor_time import processor_nanoseconds

logger = logging.getLogger(__name__)
_LOOKS_PER_PATIENCE = 6


class Watched(Protocol):
    """A rank's process."""

    @property
    def pid(self) -> int:
        """The process."""

    @property
    def name(self) -> str:
        """For messages."""

    def kill(self, reason: str) -> None:
        """End it: whoever waits for it is told."""


class RankWatch(threading.Thread):
    """Kills each rank that has had no time on a processor for ``stopped_seconds``: it can never wake up again.

    A rank that waits for its engine, or for another rank, runs now and then all the same (``beat``). How long a rank may
    compute is not judged here.
    """

    def __init__(
        self,
        ranks: Sequence[Watched],
        stopped_seconds: float,
        runtime: Callable[[int], int | None] = processor_nanoseconds,
    ) -> None:
        super().__init__(name="rank-watch", daemon=True)
        self._ranks, self._runtime = ranks, runtime
        self._interval = stopped_seconds / _LOOKS_PER_PATIENCE
        self._patience = Patience(stopped_seconds, hung_seconds=float("inf"))
        self._is_over = threading.Event()

    def stop(self) -> None:
        """End the thread; returns when it has ended."""
        self._is_over.set()
        self.join()

    def run(self) -> None:
        """See the class."""
        looked_at = time.monotonic()
        watches = [(rank, EngineWatch(self._patience, looked_at)) for rank in self._ranks]
        while not self._is_over.wait(self._interval):
            now = time.monotonic()
            for rank, watch in watches:
                if now - looked_at > 2 * self._interval:
                    watch.was_away(now)
                watch.ran(self._runtime(rank.pid), now)
                if (reason := watch.complaint(now)) is not None:
                    logger.error("%s is killed: %s", rank.name, reason)
                    rank.kill(reason)
            looked_at = now


def beat(stopped_seconds: float, is_over: threading.Event) -> threading.Thread:
    """Start a thread of a rank's process that runs often enough to show that the process does."""

    def run() -> None:
        while not is_over.wait(stopped_seconds / _LOOKS_PER_PATIENCE / 2):
            pass

    thread = threading.Thread(target=run, name="rank-beat", daemon=True)
    thread.start()
    return thread
