"""Which clients have used the service lately."""

import time
from collections.abc import Callable, Set


class RecentClients:
    """Owns when each client was noted last. seconds: for how long a client counts after that."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._noted_at: dict[str, float] = {}

    def note(self, client: str) -> None:
        """Record that a client asks for something now."""
        self._noted_at[client] = self._clock()

    @property
    def names(self) -> Set[str]:
        """Return the clients that count now."""
        since = self._clock() - self._seconds
        self._noted_at = {name: noted for name, noted in self._noted_at.items() if noted > since}
        return self._noted_at.keys()
