"""When a request of a batch may run: only while no other request waits for workers, and few at a time.

One that runs gives way: when another request has to wait for workers, it is stopped and begun again later.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class Place:
    """The right to run one request of ``owner``, while ``is_held``. has_begun: its first token has come."""

    owner: str
    is_held: bool = False
    has_begun: bool = False
    scope: asyncio.Timeout | None = None

    @property
    def is_stopping(self) -> bool:
        """Whether its request was told to give way and has not done so yet."""
        return self.scope is not None and self.scope.when() is not None


class LineGate:
    """Owns the requests of batches that wait to begin: here, and not in the router's queue.

    limit: how many run at once. may_begin: whether nobody else waits; call ``look`` when that may have changed. The next
    one to begin is the first one of the owner with the fewest running ones.
    """

    def __init__(self, limit: int, may_begin: Callable[[], bool]) -> None:
        self._limit = limit
        self._may_begin = may_begin
        self._running: Counter[str] = Counter()
        self._waiting: list[tuple[Place, asyncio.Future[None]]] = []
        self._held: list[Place] = []

    async def acquire(self, owner: str) -> Place:
        """Wait for a place; ``release`` gives it back."""
        place = Place(owner)
        await self._wait(place)
        return place

    def release(self, place: Place) -> None:
        """Give back a place. Does nothing for one that is not held."""
        if place.is_held:
            place.is_held = False
            self._held.remove(place)
            self._running[place.owner] -= 1
            self.look()

    def look(self) -> None:
        """Let those begin that may."""
        while self._waiting and self._running.total() < self._limit and self._may_begin():
            waiter = min(self._waiting, key=lambda waiting: self._running[waiting[0].owner])
            self._waiting.remove(waiter)
            place, granted = waiter
            if not granted.done():
                self._running[place.owner] += 1
                place.is_held = True
                self._held.append(place)
                granted.set_result(None)

    async def run(self, place: Place, work: Callable[[], Awaitable[T]]) -> T:
        """Do ``work``. Where it has to give way it is cancelled, and done again as soon as there is a place again."""
        while True:
            place.has_begun = False
            try:
                async with asyncio.timeout(None) as place.scope:
                    return await work()
            except TimeoutError:
                if place.scope is None or not place.scope.expired():
                    raise
            finally:
                place.scope = None
            self.release(place)
            await self._wait(place)

    def give_way(self, number: int) -> None:
        """Stop so many requests that run, less those that are stopping already: newest first, of those with a token.

        Those without a token come after them, oldest first: the others of them may wait for workers themselves.
        """
        running = [place for place in self._held if place.scope is not None]
        number -= sum(place.is_stopping for place in running)
        steady = [place for place in running if not place.is_stopping]
        begun = [place for place in reversed(steady) if place.has_begun]
        for place in [*begun, *(place for place in steady if not place.has_begun)][: max(0, number)]:
            if place.scope is not None:
                place.scope.reschedule(asyncio.get_running_loop().time())

    async def _wait(self, place: Place) -> None:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = (place, granted)
        self._waiting.append(waiter)
        self.look()
        try:
            await granted
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            self.release(place)
            raise
