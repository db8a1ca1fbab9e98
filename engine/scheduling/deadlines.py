"""One queue of deadlines: which request must be looked at when."""

import heapq
import itertools
from dataclasses import dataclass, field


@dataclass(frozen=True, order=True)
class Deadline:
    """When (seconds of the monotonic clock) the request with this key must have left a wait stage, named ``stage``.

    None bounds the whole life of the request. seconds: how long it was given, for the message.
    """

    when: float
    key: str = field(compare=False)
    seconds: float = field(compare=False)
    stage: str | None = field(default=None, compare=False)


class Deadlines:
    """A heap of the deadlines of live requests; what belongs to a forgotten one is dropped as it surfaces."""

    def __init__(self) -> None:
        self._heap: list[tuple[Deadline, int]] = []
        self._lives: dict[str, int] = {}
        self._life_numbers = itertools.count()

    def add(self, deadline: Deadline) -> None:
        """Remember a deadline; its request is live until ``forget``. A key may live again: with new deadlines only."""
        life = self._lives.setdefault(deadline.key, next(self._life_numbers))
        heapq.heappush(self._heap, (deadline, life))

    def forget(self, key: str) -> None:
        """The request ended."""
        self._lives.pop(key, None)
        if len(self._heap) > 4 * len(self._lives) + 64:
            self._heap = [entry for entry in self._heap if self._is_live(*entry)]
            heapq.heapify(self._heap)

    def take_expired(self, now: float) -> list[Deadline]:
        """Deadlines of live requests at or before ``now``, earliest first; each is returned once."""
        expired = []
        while self._heap and self._heap[0][0].when <= now:
            deadline, life = heapq.heappop(self._heap)
            if self._is_live(deadline, life):
                expired.append(deadline)
        return expired

    def next(self) -> float | None:
        """When the earliest one of a live request is due."""
        while self._heap and not self._is_live(*self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0].when if self._heap else None

    def _is_live(self, deadline: Deadline, life: int) -> bool:
        return self._lives.get(deadline.key) == life
