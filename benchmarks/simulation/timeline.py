"""Simulated time: events in the order of their times."""

import heapq
from collections.abc import Callable
from itertools import count


class Timeline:
    """Owns the time and the events to come. Events of one time happen in the order in which they were added."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, time: float, event: Callable[[], None]) -> None:
        """Call ``event`` at a time; now if that is past."""
        heapq.heappush(self._events, (max(time, self.now), next(self._numbers), event))

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Call ``event`` in ``seconds``."""
        self.at(self.now + seconds, event)

    def run_until(self, end: float) -> None:
        """Let all events happen up to ``end``, which is the time afterwards."""
        while self._events and self._events[0][0] <= end:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = max(self.now, end)
