"""Requests that were present when several workers died: one of them is the cause, and it must not take the others with it.

A request with which all but one of ``max_worker_deaths`` workers were lost is a suspect. Its next attempts run at workers
without another suspect, so that the one that kills its worker is alone there with requests that may be tried again, and ends
with its last death. The others are answered.

Suspects wait for such workers here, in their order, and not in the admission queue, where new requests would wait behind
them. A suspect stays one until its end: it may kill after any token.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from router.attempts.current_attempt import CurrentAttempt
from router.concurrency import ChangeSignal
from router.routing.policy import PlacementRequest, candidates, missing_role
from router.workers.registry import Registry


class Suspect(Protocol):
    """A request as other suspects see it."""

    @property
    def current(self) -> CurrentAttempt:
        """The attempt that runs."""


class Suspects:
    """Owns the list of the suspects of one router."""

    def __init__(self, registry: Registry, changes: ChangeSignal) -> None:
        self._registry = registry
        self._turn = asyncio.Lock()
        self._suspects: set[Suspect] = set()
        self._changed = asyncio.Event()  # the one in ``_wait`` looks again
        changes.add_listener(self._changed.set)
        changes.add_room_listener(self._changed.set)

    def remove(self, suspect: Suspect) -> None:
        """Remove a suspect that has ended. Does nothing for another request."""
        self._suspects.discard(suspect)
        self._changed.set()

    def occupied(self, suspect: Suspect) -> frozenset[str]:
        """Return the ids of the workers on which other suspects may run now; none for a request that is no suspect."""
        if suspect not in self._suspects:
            return frozenset()
        return frozenset().union(*(_workers(other) for other in self._suspects if other is not suspect))

    @asynccontextmanager
    async def turn(
        self, suspect: Suspect, request: PlacementRequest, deadline: float
    ) -> AsyncIterator[frozenset[str]]:
        """Wait until workers without another suspect can take the request; yield the ids of the occupied ones.

        Within the block, no other suspect begins. Raises TimeoutError at the deadline.
        """
        async with asyncio.timeout(deadline - time.monotonic()):
            await self._turn.acquire()
            try:
                self._suspects.add(suspect)
                await self._wait(suspect, request)
            except BaseException:  # a client that leaves while it waits must not keep the turn
                self._turn.release()
                raise
        try:
            yield self.occupied(suspect)
        finally:
            self._turn.release()

    async def _wait(self, suspect: Suspect, request: PlacementRequest) -> None:
        while True:
            self._changed.clear()
            occupied = self.occupied(suspect)
            if not occupied:
                return
            views = self._registry.views
            free = [views.get(worker) for worker in candidates(views, request) - occupied]
            # the workers without another suspect have all roles for the request
            if missing_role([ranked.size for ranked in free if ranked], request.least_plan) is None:
                return
            await self._changed.wait()


def _workers(suspect: Suspect) -> frozenset[str]:
    """Return the ids of the workers on which a suspect may run now."""
    attempt = suspect.current.attempt
    if attempt is None:
        return frozenset()
    return frozenset(leg.worker.name for leg in attempt.legs if attempt.legs.is_open(leg))
