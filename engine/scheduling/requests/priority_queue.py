"""The order in which requests get places and blocks, and lose them last to first: priority, then arrival."""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Reversible
from operator import attrgetter

from engine.scheduling.requests.request import Request

_PRECEDENCE = attrgetter("precedence")


class PriorityQueue(Reversible[Request]):
    """Requests sorted by ``Request.precedence``; one that is added again gets its old place."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._by_client: dict[str, list[Request]] = {}

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __reversed__(self) -> Iterator[Request]:
        return reversed(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def first(self) -> Request | None:
        """The request that is next; None while the queue is empty."""
        return self._requests[0] if self._requests else None

    @property
    def clients(self) -> Collection[str]:
        """The clients that have requests in the queue."""
        return self._by_client.keys()

    def first_of(self, client: str) -> Request:
        """Return the first request of one of ``clients``."""
        return self._by_client[client][0]

    def of(self, client: str) -> Iterator[Request]:
        """Return the requests of one of ``clients``, in their order."""
        return iter(self._by_client[client])

    def num_of(self, client: str) -> int:
        """Return how many requests of a client are queued."""
        return len(self._by_client.get(client, ()))

    def add(self, request: Request) -> None:
        """Queue a request, which must not be queued already."""
        insort(self._requests, request, key=_PRECEDENCE)
        insort(self._by_client.setdefault(request.asked.tenant, []), request, key=_PRECEDENCE)

    def remove(self, request: Request) -> bool:
        """Remove a request; return False if it is not queued."""
        if not _take_out(self._requests, request):
            return False
        own = self._by_client[request.asked.tenant]
        _take_out(own, request)
        if not own:
            del self._by_client[request.asked.tenant]
        return True


def _take_out(requests: list[Request], request: Request) -> bool:
    place = bisect_left(requests, request.precedence, key=_PRECEDENCE)
    if place == len(requests) or requests[place] is not request:
        return False
    del requests[place]
    return True


def comes_first(request: Request, other: Request | None) -> bool:
    """Return whether ``request`` is served before ``other``, or there is no other."""
    return other is None or request.precedence < other.precedence
