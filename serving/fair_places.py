"""A bounded number of places for what waits for its client: none keeps others out by holding places and saying nothing."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from contract.errors import OverloadedError

EVICTION_AGE_SECONDS = 0.25
"""A place is not taken away before it has been held as long: its client has not had the time to send."""


@dataclass(eq=False)
class _Place:
    """A place of one of a client's connections, from ``since`` on (the loop's clock), which ``scope`` takes away."""

    client: str
    connection: str
    since: float = 0.0
    scope: asyncio.Timeout | None = None

    @property
    def is_leaving(self) -> bool:
        """Whether it has been taken away."""
        return self.scope is not None and self.scope.when() is not None


class FairPlaces:
    """Owns the places. A client or connection with fewer of them takes one from those that hold most, oldest first.

    limit: places. max_waiting: how many may wait for one.
    """

    def __init__(self, limit: int, max_waiting: int) -> None:
        self._limit = limit
        self._max_waiting = max_waiting
        self._held: list[_Place] = []
        self._waiting: dict[_Place, asyncio.Future[None]] = {}
        self._by_client: Counter[str] = Counter()
        self._by_connection: Counter[str] = Counter()
        self._promised: _Place | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_held(self) -> int:
        """Places that are held."""
        return len(self._held)

    @asynccontextmanager
    async def place(self, client: str, connection: str) -> AsyncIterator[None]:
        """Hold a place for as long as the block lasts. Raises OverloadedError, also within, where there is none (more)."""
        place = _Place(client, connection)
        await self._take(place)
        try:
            async with asyncio.timeout(None) as place.scope:
                yield
        except TimeoutError:
            if place.scope is None or not place.scope.expired():
                raise
            raise OverloadedError(
                "other clients needed the place of this call, which waited for its client; send it again"
            ) from None
        finally:
            self._give_back(place)

    async def _take(self, place: _Place) -> None:
        if len(self._waiting) >= self._max_waiting:
            self._refuse_one(place)
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[place] = granted
        self._look()
        try:
            await granted
        except BaseException:
            self._waiting.pop(place, None)
            self._give_back(place)
            raise

    def _refuse_one(self, newest: _Place) -> None:
        """Refuse the last one of the client, or connection, with most that wait; ``newest`` where it has as many."""
        error = OverloadedError(f"{len(self._waiting)} calls wait for their turn; send this one again later")
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

    def _give_back(self, place: _Place) -> None:
        if place in self._held:
            self._held.remove(place)
            self._count(place, -1)
            self._look()

    def _count(self, place: _Place, number: int) -> None:
        for counts, name in ((self._by_client, place.client), (self._by_connection, place.connection)):
            counts[name] += number
            if not counts[name]:
                del counts[name]

    def _look(self) -> None:
        """Give places to those that hold fewest, and take one away for the next of them."""
        while self._waiting and len(self._held) < self._limit:
            place = self._next()
            granted = self._waiting.pop(place)
            if granted.done():  # its task was cancelled, and has not run since
                continue
            granted.set_result(None)
            place.since = asyncio.get_running_loop().time()
            self._held.append(place)
            self._count(place, 1)
        if self._waiting and not any(place.is_leaving for place in self._held):
            self._take_away_for(self._next())

    def _next(self) -> _Place:
        """Return the one for which a place was taken away, or that of the client and connection with fewest places."""
        if self._promised in self._waiting:
            return self._promised
        return min(self._waiting, key=self._share)

    def _share(self, place: _Place) -> tuple[int, int]:
        return self._by_client[place.client], self._by_connection[place.connection]

    def _take_away_for(self, newest: _Place) -> None:
        """Take the oldest place of whoever holds most, if that is more than ``newest`` does."""
        larger = [place for place in self._held if self._holds_more(place, newest)]
        if not larger:
            return
        loop = asyncio.get_running_loop()
        chosen = max(larger, key=lambda place: (*self._share(place), -place.since))
        seconds_left = chosen.since + EVICTION_AGE_SECONDS - loop.time()
        if seconds_left <= 0 and chosen.scope is not None:
            chosen.scope.reschedule(loop.time())
            self._promised = newest
        elif self._timer is None:
            self._timer = loop.call_later(seconds_left, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self._look()

    def _holds_more(self, place: _Place, other: _Place) -> bool:
        if place.client != other.client:
            return self._by_client[place.client] > self._by_client[other.client]
        return self._by_connection[place.connection] > self._by_connection[other.connection]
