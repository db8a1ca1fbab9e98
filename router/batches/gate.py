"""The gate of batches: their requests run only while no other request waits for workers, and a few at a time.

A running one is preempted when another request has to wait for workers: it is stopped and begins again later.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class Permit:
    """The permission to run one request of ``owner``, while ``is_held``. has_begun: its first token has arrived."""

    owner: str
    is_held: bool = False
    has_begun: bool = False
    scope: asyncio.Timeout | None = None

    @property
    def is_stopping(self) -> bool:
        """True while its request is being preempted."""
        return self.scope is not None and self.scope.when() is not None


class LineGate:
    """Owns the requests of batches that wait to begin; they wait here instead of in the router's queue.

    limit: how many run at once. may_begin: returns True while no other request waits; call ``admit`` when that may have
    changed. The next one to begin is the first one of the owner with the fewest running ones.
    """

    def __init__(self, limit: int, may_begin: Callable[[], bool]) -> None:
        self._limit = limit
        self._may_begin = may_begin
        self._running: Counter[str] = Counter()
        self._waiting: list[tuple[Permit, asyncio.Future[None]]] = []
        self._held: list[Permit] = []

    def num_by_state(self) -> dict[str, int]:
        """Return the number of requests that wait here, and of those that may run."""
        return {"waiting": len(self._waiting), "running": self._running.total()}

    async def acquire(self, owner: str) -> Permit:
        """Wait for a permit. Give it back with ``release``."""
        permit = Permit(owner)
        await self._wait(permit)
        return permit

    def release(self, permit: Permit) -> None:
        """Give a permit back. Does nothing if it is not held."""
        if permit.is_held:
            permit.is_held = False
            self._held.remove(permit)
            self._running[permit.owner] -= 1
            self.admit()

    def admit(self) -> None:
        """Grant permits to waiting requests, as many as may begin now."""
        while self._waiting and self._running.total() < self._limit and self._may_begin():
            waiter = min(self._waiting, key=lambda waiting: self._running[waiting[0].owner])
            self._waiting.remove(waiter)
            permit, granted = waiter
            # its batch was cancelled while it waited
            if not granted.done():
                self._running[permit.owner] += 1
                permit.is_held = True
                self._held.append(permit)
                granted.set_result(None)

    async def run(self, permit: Permit, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``work``. If it is preempted, it is cancelled and called again with a new permit."""
        while True:
            permit.has_begun = False
            try:
                async with asyncio.timeout(None) as permit.scope:
                    return await work()
            except TimeoutError:
                # a time-out of the work itself, which is no preemption
                if permit.scope is None or not permit.scope.expired():
                    raise
            finally:
                permit.scope = None
            self.release(permit)
            await self._wait(permit)

    def preempt(self, number: int) -> None:
        """Stop ``number`` running requests, less those that are stopping already.

        The newest ones with a first token are stopped first. Those without one follow, oldest first: the newest may
        themselves be waiting for workers.
        """
        running = [permit for permit in self._held if permit.scope is not None]
        number -= sum(permit.is_stopping for permit in running)
        steady = [permit for permit in running if not permit.is_stopping]
        begun = [permit for permit in reversed(steady) if permit.has_begun]
        for permit in [*begun, *(permit for permit in steady if not permit.has_begun)][: max(0, number)]:
            if permit.scope is not None:
                # a time that has come: the block is left with TimeoutError in the next turn of the loop
                permit.scope.reschedule(asyncio.get_running_loop().time())

    async def _wait(self, permit: Permit) -> None:
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = (permit, granted)
        self._waiting.append(waiter)
        self.admit()
        try:
            await granted
        except asyncio.CancelledError:
            # else it was granted in the same turn, and is given back
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            self.release(permit)
            raise
