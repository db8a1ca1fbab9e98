"""One queue of the deadlines of all requests."""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, order=True)
class Deadline:
    """A time (seconds of the monotonic clock) by which the request ``key`` must have left the wait stage named ``stage``.

    stage: None for the deadline of the request's whole life. seconds: how long it was given, for the message.
    """

    when: float
    key: str = field(compare=False)
    seconds: float = field(compare=False)
    stage: str | None = field(default=None, compare=False)


class Deadlines:
    """A heap of the deadlines of live requests; those of forgotten requests are dropped when they come to its top.

    clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heap: list[tuple[Deadline, int]] = []
        self._lives: dict[str, int] = {}
        self._life_numbers = itertools.count()

    def add(self, deadline: Deadline) -> None:
        """Add a deadline; its request is live until ``forget``. A key that lives again has new deadlines only."""
        life = self._lives.setdefault(deadline.key, next(self._life_numbers))
        heapq.heappush(self._heap, (deadline, life))

    def start(self, key: str, seconds: float, stage: str) -> None:
        """Add the deadline of a request that has entered a wait stage now."""
        self.add(Deadline(self._clock() + seconds, key, seconds, stage))

    def forget(self, key: str) -> None:
        """Drop the deadlines of a request that has finished."""
        self._lives.pop(key, None)
        if len(self._heap) > 4 * len(self._lives) + 64:
            self._heap = [entry for entry in self._heap if self._is_live(*entry)]
            heapq.heapify(self._heap)

    def take_expired(self) -> list[Deadline]:
        """Return the deadlines of live requests that are due, earliest first, once each."""
        expired = []
        now = self._clock()
        while self._heap and self._heap[0][0].when <= now:
            deadline, life = heapq.heappop(self._heap)
            if self._is_live(deadline, life):
                expired.append(deadline)
        return expired

    def next(self) -> float | None:
        """Return when the earliest deadline of a live request is due."""
        while self._heap and not self._is_live(*self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0].when if self._heap else None

    def is_due(self) -> bool:
        """Return whether ``take_expired`` would return something."""
        if not self._heap or self._heap[0][0].when > self._clock():  # the usual case, in every step
            return False
        due = self.next()
        return due is not None and due <= self._clock()

    def _is_live(self, deadline: Deadline, life: int) -> bool:
        return self._lives.get(deadline.key) == life
