"""Requests that were present when several workers died: one of them is the cause, and it must not take the others with it.

A request with which all but one of ``max_worker_deaths`` workers were lost is a suspect. Its next attempts run at workers
without another suspect, so that the one that kills its worker is alone there with requests that may be tried again, and ends
with its last death. The others are answered.

A suspect waits for such a worker in the admission queue, in a lane of its own: other requests overtake it at the occupied
workers. The next suspects wait for their turn here. One stays a suspect until its end: it may kill after any token.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Set
from contextlib import asynccontextmanager
from typing import Protocol

from router.attempts.current_attempt import CurrentAttempt


class Suspect(Protocol):
    """A request as other suspects see it."""

    @property
    def current(self) -> CurrentAttempt:
        """The attempt that runs."""


class OccupiedWorkers(Set[str]):
    """The ids of the workers on which other suspects may run now. It follows them: their ends empty it."""

    def __init__(self, suspect: Suspect, suspects: "Set[Suspect]") -> None:
        self._suspect = suspect
        self._suspects = suspects

    def __contains__(self, worker: object) -> bool:
        return any(worker == name for name in self)

    def __iter__(self) -> Iterator[str]:
        names: frozenset[str] = frozenset()
        return iter(names.union(*(_workers(other) for other in self._suspects if other is not self._suspect)))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Suspects:
    """Owns the list of the suspects of one router."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._suspects: set[Suspect] = set()

    def remove(self, suspect: Suspect) -> None:
        """Remove a suspect that has ended. Does nothing for another request."""
        self._suspects.discard(suspect)

    def occupied(self, suspect: Suspect) -> frozenset[str]:
        """Return the ids of the workers on which other suspects may run now; none for a request that is no suspect."""
        return (
            frozenset(OccupiedWorkers(suspect, self._suspects)) if suspect in self._suspects else frozenset()
        )

    @asynccontextmanager
    async def turn(self, suspect: Suspect, deadline: float) -> AsyncIterator[OccupiedWorkers]:
        """Wait until no other suspect is to begin before this one; yield the workers that it must not share.

        Raises TimeoutError at the deadline.
        """
        async with asyncio.timeout(deadline - time.monotonic()):
            await self._turn.acquire()
        try:
            self._suspects.add(suspect)
            yield OccupiedWorkers(suspect, self._suspects)
        finally:
            self._turn.release()


def _workers(suspect: Suspect) -> frozenset[str]:
    """Return the ids of the workers on which a suspect may run now."""
    attempt = suspect.current.attempt
    if attempt is None:
        return frozenset()
    return frozenset(leg.worker.name for leg in attempt.legs if attempt.legs.is_open(leg))
