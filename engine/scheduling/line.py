"""The one order in which requests get places and blocks, and in which they lose them: priority, then arrival."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Reversible
from operator import attrgetter

from engine.scheduling.request import Request

_PRECEDENCE = attrgetter("precedence")


class Line(Reversible[Request]):
    """Requests in the order of ``Request.precedence``, whenever they joined. Who comes back gets the old place."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __reversed__(self) -> Iterator[Request]:
        return reversed(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def first(self) -> Request | None:
        """Whose turn it is; None while nobody stands in line."""
        return self._requests[0] if self._requests else None

    def add(self, request: Request) -> None:
        """The request joins; it must not stand in line already."""
        insort(self._requests, request, key=_PRECEDENCE)

    def remove(self, request: Request) -> bool:
        """The request leaves; False, and nothing happens, where it does not stand in line."""
        place = bisect_left(self._requests, request.precedence, key=_PRECEDENCE)
        if place == len(self._requests) or self._requests[place] is not request:
            return False
        del self._requests[place]
        return True


def comes_first(request: Request, other: Request | None) -> bool:
    """True when ``request`` is served before ``other``, and where there is no other."""
    return other is None or request.precedence < other.precedence
