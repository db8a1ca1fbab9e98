"""A bounded number of places for calls that wait for their clients, so that idle clients cannot block others."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from contract.errors import OverloadedError

EVICTION_AGE_SECONDS = 0.25
"""Minimum time for which a place is held before it is evicted, so that its client has time to send."""


@dataclass(eq=False)
class _Place:
    """A place of one of a client's connections, held since ``since`` (the loop's clock); ``scope`` cancels its holder."""

    client: str
    connection: str
    since: float = 0.0
    scope: asyncio.Timeout | None = None

    @property
    def is_evicted(self) -> bool:
        """True if it has been evicted."""
        return self.scope is not None and self.scope.when() is not None


class _Shares:
    """Counts the places that are held by each client and each connection."""

    def __init__(self) -> None:
        self._by_client: Counter[str] = Counter()
        self._by_connection: Counter[str] = Counter()

    def add(self, place: _Place, number: int) -> None:
        """Add ``number`` (1 or -1) to the counts of a place's client and connection."""
        for counts, name in ((self._by_client, place.client), (self._by_connection, place.connection)):
            counts[name] += number
            if not counts[name]:
                del counts[name]

    def of(self, place: _Place) -> tuple[int, int]:
        """Return the numbers of places that the client and the connection of a place hold."""
        return self._by_client[place.client], self._by_connection[place.connection]

    def is_larger(self, place: _Place, other: _Place) -> bool:
        """Return True if the client of ``place``, or its connection at equal clients, holds more than ``other``'s."""
        if place.client != other.client:
            return self._by_client[place.client] > self._by_client[other.client]
        return self._by_connection[place.connection] > self._by_connection[other.connection]


class FairPlaces:
    """Owns the places. A client or connection with fewer places evicts the oldest of those that hold most.

    limit: number of places. max_waiting: number of calls that may wait for one.
    """

    def __init__(self, limit: int, max_waiting: int) -> None:
        self._limit = limit
        self._max_waiting = max_waiting
        self._held: list[_Place] = []
        self._waiting: dict[_Place, asyncio.Future[None]] = {}
        self._shares = _Shares()
        self._promised: _Place | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_held(self) -> int:
        """The number of places that are held."""
        return len(self._held)

    @asynccontextmanager
    async def place(self, client: str, connection: str) -> AsyncIterator[None]:
        """Hold a place within the block. Raises OverloadedError if there is none, and in the block if it is evicted."""
        place = _Place(client, connection)
        await self._acquire(place)
        try:
            async with asyncio.timeout(None) as place.scope:
                yield
        except TimeoutError:
            if place.scope is None or not place.scope.expired():
                raise
            raise OverloadedError(
                "this call waited for its client and was ended to make room for other clients; send it again"
            ) from None
        finally:
            self._release(place)

    async def _acquire(self, place: _Place) -> None:
        if len(self._waiting) >= self._max_waiting:
            self._reject_one(place)
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[place] = granted
        self._grant()
        try:
            await granted
        except BaseException:
            self._waiting.pop(place, None)
            self._release(place)
            raise

    def _reject_one(self, newest: _Place) -> None:
        """Reject the last call of the client, or connection, with most waiting calls; ``newest`` if it has as many."""
        error = OverloadedError(f"{len(self._waiting)} calls are waiting already; send this one again later")
        clients = Counter(place.client for place in self._waiting)
        client, count = clients.most_common(1)[0]
        crowd = [place for place in self._waiting if place.client == client]
        if newest.client == client:
            connections = Counter(place.connection for place in crowd)
            connection, count = connections.most_common(1)[0]
            crowd = [place for place in crowd if place.connection == connection]
            own = connections[newest.connection]
        else:
            own = clients[newest.client]
        if count <= own + 1:
            raise error
        granted = self._waiting.pop(crowd[-1])
        if not granted.done():
            granted.set_exception(error)

    def _release(self, place: _Place) -> None:
        if place in self._held:
            self._held.remove(place)
            self._shares.add(place, -1)
            self._grant()

    def _grant(self) -> None:
        """Grant free places to those that hold fewest, and evict one for the next of them."""
        while self._waiting and len(self._held) < self._limit:
            place = self._next_waiting()
            granted = self._waiting.pop(place)
            if granted.done():  # its task was cancelled and has not run yet
                continue
            granted.set_result(None)
            place.since = asyncio.get_running_loop().time()
            self._held.append(place)
            self._shares.add(place, 1)
        if self._waiting and not any(place.is_evicted for place in self._held):
            self._evict_for(self._next_waiting())

    def _next_waiting(self) -> _Place:
        """Return the call for which a place was evicted, or that of the client and connection with fewest places."""
        if self._promised in self._waiting:
            return self._promised
        return min(self._waiting, key=self._shares.of)

    def _evict_for(self, newest: _Place) -> None:
        """Evict the oldest place of the client that holds most, if that is more than ``newest``'s holds."""
        larger = [place for place in self._held if self._shares.is_larger(place, newest)]
        if not larger:
            return
        loop = asyncio.get_running_loop()
        chosen = max(larger, key=lambda place: (*self._shares.of(place), -place.since))
        seconds_left = chosen.since + EVICTION_AGE_SECONDS - loop.time()
        if seconds_left <= 0 and chosen.scope is not None:
            chosen.scope.reschedule(loop.time())
            self._promised = newest
        elif self._timer is None:
            self._timer = loop.call_later(seconds_left, self._retry_eviction)

    def _retry_eviction(self) -> None:
        self._timer = None
        self._grant()
