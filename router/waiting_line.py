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
from router.policy import Placement, Wish, missing_role, place
from router.registry import Registry


@dataclass(order=True)
class _Waiter:
    priority_and_arrival: tuple[int, float]
    wish: Wish = field(compare=False)
    begin: Callable[[Placement], Attempt] = field(compare=False)
    attempt: asyncio.Future[Attempt] = field(compare=False)


class WaitingLine:
    """Owns the requests that are bound to no worker, by priority and arrival. Nobody passes the head of the line.

    patience_seconds: how long a role may have no worker at all before those who need it end with an error.
    """

    def __init__(self, registry: Registry, changes: ChangeSignal, patience_seconds: float) -> None:
        self._registry = registry
        self._patience_seconds = patience_seconds
        self._line: list[_Waiter] = []
        self._turn = 0
        self._patience: asyncio.TimerHandle | None = None
        self._is_patience_over = False
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
        self._serve()
        try:
            return await attempt
        except asyncio.CancelledError:
            if attempt.done() and not attempt.cancelled() and attempt.exception() is None:
                attempt.result().close()
            raise
        finally:
            self._leave(waiter)

    def _leave(self, waiter: _Waiter) -> None:
        if any(other is waiter for other in self._line):
            waiter.attempt.cancel()
            self._serve()

    def _serve(self) -> None:
        """Bind from the head of the line for as long as there is room."""
        self._line = [waiter for waiter in self._line if not waiter.attempt.done()]
        while self._line:
            placement = place(self._registry.snapshot(), self._line[0].wish, self._turn)
            if placement is None:
                break
            head = self._line.pop(0)
            self._turn += 1
            head.attempt.set_result(head.begin(placement))
        self._watch_patience()

    def _watch_patience(self) -> None:
        if not self._line or self._missing_for(self._line[0]) is None:
            if self._patience is not None:
                self._patience.cancel()
            self._patience = None
            self._is_patience_over &= missing_role(self._registry.snapshot()) is not None
        elif self._is_patience_over:
            self._end_hopeless()
        elif self._patience is None:
            loop = asyncio.get_running_loop()
            self._patience = loop.call_later(self._patience_seconds, self._lose_patience)

    def _lose_patience(self) -> None:
        self._patience = None
        self._is_patience_over = True
        self._end_hopeless()

    def _end_hopeless(self) -> None:
        hopeless = [(waiter, self._missing_for(waiter)) for waiter in self._line]
        self._line = [waiter for waiter, missing in hopeless if missing is None]
        for waiter, missing in hopeless:
            if missing is not None:
                text = f"no worker is ready: {missing}, for {self._patience_seconds:g} s; try again later"
                waiter.attempt.set_exception(UnavailableError(text))

    def _missing_for(self, waiter: _Waiter) -> str | None:
        return missing_role(self._registry.snapshot(), is_replay=waiter.wish.is_replay)
