"""When a request of a batch may begin: only while no other request waits for workers, and few at a time."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class LineGate:
    """Owns the requests of batches that wait to begin: here, and not in the router's queue.

    limit: how many run at once. may_begin: whether nobody else waits; call ``look`` when that may have changed. The next
    one to begin is the first one of the owner with the fewest running ones.
    """

    def __init__(self, limit: int, may_begin: Callable[[], bool]) -> None:
        self._limit, self._may_begin = limit, may_begin
        self._running: Counter[str] = Counter()
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def enter(self, owner: str) -> AsyncIterator[None]:
        """Wait for a place, and hold it for as long as the block lasts."""
        await self.acquire(owner)
        try:
            yield
        finally:
            self.release(owner)

    async def acquire(self, owner: str) -> None:
        """Wait for a place; ``release`` gives it back."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = (owner, place)
        self._waiting.append(waiter)
        self.look()
        try:
            await place
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif not place.cancelled():
                self.release(owner)
            raise

    def release(self, owner: str) -> None:
        """Give back a place."""
        self._running[owner] -= 1
        self.look()

    def look(self) -> None:
        """Let those begin that may."""
        while self._waiting and self._running.total() < self._limit and self._may_begin():
            waiter = min(self._waiting, key=lambda waiting: self._running[waiting[0]])
            self._waiting.remove(waiter)
            owner, place = waiter
            if not place.done():
                self._running[owner] += 1
                place.set_result(None)
