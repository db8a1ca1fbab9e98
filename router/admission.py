"""A bound on the requests that wait for workers, and a share of it for each client."""

from collections import Counter
from collections.abc import Mapping

from contract.errors import OverloadedError, UnavailableError


def has_slot(num_waiting: Mapping[str, int], tenant: str, max_queue: int, num_more: int = 1) -> bool:
    """Return True if ``num_more`` requests of ``tenant`` may wait, as if they came one after the other.

    num_waiting: requests that wait, by client. The queue is ``max_queue`` long. When it is full, a client that holds less
    than its share (``max_queue`` divided by the clients that wait) is still admitted: another one holds more than its own.
    Therefore at most ``2 * max_queue`` requests wait, and no client is kept out by the others.
    """
    if sum(num_waiting.values()) + num_more <= max_queue:
        return True
    clients = {name for name, count in num_waiting.items() if count} | {tenant}
    return len(clients) > 1 and num_waiting.get(tenant, 0) + num_more <= max_queue // len(clients)


class Admission:
    """Owns the slots of the queue, by client. ``max_queue`` is their number."""

    def __init__(self, max_queue: int) -> None:
        self._max_queue = max_queue
        self._num_waiting: Counter[str] = Counter()
        self._refusal: str | None = None

    def close(self, reason: str) -> None:
        """Reject every request from now on."""
        self._refusal = reason

    @property
    def is_closed(self) -> bool:
        """True after ``close``."""
        return self._refusal is not None

    @property
    def num_waiting(self) -> int:
        """Requests that hold a slot."""
        return self._num_waiting.total()

    def check(self, tenant: str, num_more: int) -> None:
        """Raise OverloadedError if ``num_more`` requests of a client may not wait, UnavailableError after ``close``."""
        if self._refusal is not None:
            raise UnavailableError(self._refusal)
        if not has_slot(self._num_waiting, tenant, self._max_queue, num_more):
            raise OverloadedError(
                f"{self.num_waiting} requests wait for workers ({self._num_waiting[tenant]} of this client), this one makes "
                f"{num_more} more, and max_queue is {self._max_queue}; try again later"
            )

    def count(self, tenant: str, difference: int) -> None:
        """Count requests of a client that begin to wait, or with a negative number those that wait no more."""
        self._num_waiting[tenant] += difference
        if not self._num_waiting[tenant]:
            del self._num_waiting[tenant]
