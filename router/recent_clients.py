"""The clients that have used the service lately."""

import time
from collections.abc import Callable, Set


class RecentClients:
    """Owns the time of each client's last request, oldest first. seconds: how long a client counts as recent after it."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._noted_at: dict[str, float] = {}

    def note(self, client: str) -> None:
        """Record a request of a client."""
        self._noted_at.pop(client, None)
        self._noted_at[client] = self._clock()

    @property
    def names(self) -> Set[str]:
        """The clients that count as recent now."""
        since = self._clock() - self._seconds
        while self._noted_at and self._noted_at[oldest := next(iter(self._noted_at))] <= since:
            del self._noted_at[oldest]
        return self._noted_at.keys()
