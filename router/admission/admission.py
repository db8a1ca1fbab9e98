"""A bound on the requests that wait for workers, and a share of it for each client."""

from collections import Counter

from contract.errors import OverloadedError, UnavailableError


class WaitingCounts:
    """Counts the requests that wait, by client. All reads take the same time, however many clients there are."""

    def __init__(self) -> None:
        self.total = 0
        self._by_client: Counter[str] = Counter()

    def of(self, tenant: str) -> int:
        """Return how many requests of a client wait."""
        return self._by_client[tenant]

    def add(self, tenant: str, difference: int) -> None:
        """Count requests of a client that begin to wait, or with a negative number those that wait no more."""
        self.total += difference
        # not ``+=`` and ``del``, which a Counter implements in Python
        if number := self._by_client.get(tenant, 0) + difference:
            self._by_client[tenant] = number
        else:
            self._by_client.pop(tenant, None)

    def has_slot(self, tenant: str, max_queue: int, num_more: int = 1) -> bool:
        """Return True if ``num_more`` requests of ``tenant`` may wait, as if they came one after the other.

        The queue is ``max_queue`` long. When it is full, a client that holds less than its share (``max_queue`` divided by
        the clients that wait) is still admitted: another one holds more than its own. Therefore at most ``2 * max_queue``
        requests wait, and no client is kept out by the others.
        """
        if self.total + num_more <= max_queue:
            return True
        num_clients = len(self._by_client) + (tenant not in self._by_client)
        return num_clients > 1 and self.of(tenant) + num_more <= max_queue // num_clients


class Admission:
    """Owns the slots of the queue, by client. ``max_queue`` is their number."""

    def __init__(self, max_queue: int) -> None:
        self._max_queue = max_queue
        self._waiting = WaitingCounts()
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
        return self._waiting.total

    def check(self, tenant: str, num_more: int) -> None:
        """Raise OverloadedError if ``num_more`` requests of a client may not wait, UnavailableError after ``close``."""
        if self._refusal is not None:
            raise UnavailableError(self._refusal)
        if not self._waiting.has_slot(tenant, self._max_queue, num_more):
            raise OverloadedError(
                f"{self.num_waiting} requests wait for workers ({self._waiting.of(tenant)} of this client), this one makes "
                f"{num_more} more, and max_queue is {self._max_queue}; try again later"
            )

    def count(self, tenant: str, difference: int) -> None:
        """Count requests of a client that begin to wait, or with a negative number those that wait no more."""
        self._waiting.add(tenant, difference)
