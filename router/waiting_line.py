"""Requests that wait for workers with room: here, not in an engine's queue (late binding).

So a request is bound to the workers that are best when its turn comes, not when it came; and a worker's death costs
nobody a place in a queue.
"""

import asyncio
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from contract.errors import UnavailableError
from router.attempt import Attempt
from router.changes import ChangeSignal
from router.patience import Patience
from router.policy import Need, Placement, Wish, place
from router.registry import Registry


@dataclass(order=True)
class _Waiter:
    priority_and_arrival: tuple[int, float]
    wish: Wish = field(compare=False)
    begin: Callable[[Placement], Attempt] = field(compare=False)
    attempt: asyncio.Future[Attempt] = field(compare=False)


class WaitingLine:
    """Owns the requests that are bound to no worker, by priority and arrival.

    Nobody passes the head of the line, which is the first one that the attached workers can serve at all: those before it
    wait for a role that has no worker, until ``patience_seconds`` after it was missed first.
    """

    def __init__(self, registry: Registry, changes: ChangeSignal, patience_seconds: float) -> None:
        self._registry = registry
        self._patience_seconds = patience_seconds
        self._patience = Patience(patience_seconds, self._serve)
        self._line: list[_Waiter] = []
        self._turn = 0
        changes.listen(self._serve)

    def __len__(self) -> int:
        return len(self._line)

    async def bind(
        self, wish: Wish, priority: int, arrival: float, begin: Callable[[Placement], Attempt]
    ) -> Attempt:
        """Wait for workers with room, then ``begin`` an attempt there, at once. The caller closes it.

        Raises UnavailableError when a role that is needed has had no worker for ``patience_seconds``.
        """
        attempt: asyncio.Future[Attempt] = asyncio.get_running_loop().create_future()
        waiter = _Waiter((-priority, arrival), wish, begin, attempt)
        insort(self._line, waiter)
        if self._matters(self._line[0], waiter):
            self._serve()
        try:
            return await attempt
        except asyncio.CancelledError:
            if attempt.done() and not attempt.cancelled() and attempt.exception() is None:
                attempt.result().close()
            raise
        finally:
            self._leave(waiter)

    def close(self) -> None:
        """The router stops: nothing of the line runs any more."""
        self._patience.close()

    def _leave(self, waiter: _Waiter) -> None:
        for place_in_line, other in enumerate(self._line):
            if other is waiter:
                first = self._line[0]
                del self._line[place_in_line]
                if self._matters(first, waiter):
                    self._serve()
                return

    def _matters(self, first: _Waiter, waiter: _Waiter) -> bool:
        """False for one that comes or goes behind a first one that waits for room: nothing changes for anybody."""
        return waiter is first or bool(self._patience.missing(Need.ANSWER))

    def _serve(self) -> None:
        """Bind from the head of the line for as long as there is room."""
        if self._line and self._line[0].attempt.done():
            self._line = [waiter for waiter in self._line if not waiter.attempt.done()]
        workers = self._registry.snapshot()
        self._patience.look(workers)
        while (head := self._head()) is not None:
            waiter = self._line[head]
            placement = place(workers, waiter.wish, self._turn)
            if placement is None:
                break
            del self._line[head]
            self._turn += 1
            waiter.attempt.set_result(waiter.begin(placement))
            workers = self._registry.snapshot()
        self._end_hopeless()

    def _head(self) -> int | None:
        """Place of the first one that is waiting, and not for a role without a worker."""
        missing = self._patience.missing
        here = (i for i, w in enumerate(self._line) if not missing(w.wish.need) and not w.attempt.done())
        return next(here, None)

    def _end_hopeless(self) -> None:
        is_over = self._patience.is_over
        if not any(is_over(need) for need in Need):
            return
        hopeless = [waiter for waiter in self._line if is_over(waiter.wish.need)]
        self._line = [waiter for waiter in self._line if not is_over(waiter.wish.need)]
        for waiter in hopeless:
            if not waiter.attempt.done():
                missing = self._patience.missing(waiter.wish.need)
                text = f"no worker is ready: {missing}, for {self._patience_seconds:g} s; try again later"
                waiter.attempt.set_exception(UnavailableError(text))
