"""One queue of deadlines: who must be looked at when."""

import heapq
from dataclasses import dataclass, field

from engine.scheduling.ending import RequestStatus


@dataclass(frozen=True, order=True)
class Deadline:
    """At ``when`` (seconds of the monotonic clock) the request with this key must have left the state ``waiting``.

    None bounds the whole life of the request. seconds: how long it was given, for the message.
    """

    when: float
    key: str = field(compare=False)
    seconds: float = field(compare=False)
    waiting: RequestStatus | None = field(default=None, compare=False)


class Deadlines:
    """A heap of the deadlines of live requests; what belongs to a forgotten one is dropped as it surfaces."""

    def __init__(self) -> None:
        self._heap: list[Deadline] = []
        self._live: set[str] = set()

    def add(self, deadline: Deadline) -> None:
        """Remember a deadline; its request is live until ``forget``."""
        self._live.add(deadline.key)
        heapq.heappush(self._heap, deadline)

    def forget(self, key: str) -> None:
        """The request ended."""
        self._live.discard(key)
        if len(self._heap) > 4 * len(self._live) + 64:
            self._heap = [deadline for deadline in self._heap if deadline.key in self._live]
            heapq.heapify(self._heap)

    def take_expired(self, now: float) -> list[Deadline]:
        """Deadlines of live requests at or before ``now``, earliest first; each is returned once."""
        expired = []
        while self._heap and self._heap[0].when <= now:
            deadline = heapq.heappop(self._heap)
            if deadline.key in self._live:
                expired.append(deadline)
        return expired

    def next(self) -> float | None:
        """When the earliest one of a live request is due."""
        while self._heap and self._heap[0].key not in self._live:
            heapq.heappop(self._heap)
        return self._heap[0].when if self._heap else None
