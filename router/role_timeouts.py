"""How long requests wait for a role that no worker has: one may be starting again."""

import asyncio
from collections.abc import Callable, Sequence

from router.policy import Need, WorkerView, missing_role


class RoleTimeouts:
    """Knows since when new requests lack a role, and since when replays and embeddings do, which need less.

    seconds: how long a role may have no worker at all. on_over: called when that time has passed for one of the three.
    """

    def __init__(self, seconds: float, on_over: Callable[[], None]) -> None:
        self._seconds = seconds
        self._on_over = on_over
        self._missing: dict[Need, str | None] = dict.fromkeys(Need, "no worker was ever attached")
        self._timers: dict[Need, asyncio.TimerHandle] = {}
        self._over: set[Need] = set()

    def look(self, workers: Sequence[WorkerView]) -> None:
        """Take note of what is missing now; between two looks nothing changes."""
        for need in Need:
            self._missing[need] = missing = missing_role(workers, need)
            if missing is None:
                self._stop(need)
            elif need not in self._timers and need not in self._over:
                loop = asyncio.get_running_loop()
                self._timers[need] = loop.call_later(self._seconds, self._end, need)

    def missing(self, need: Need) -> str | None:
        """What such a request lacks; None when it can be placed sooner or later."""
        return self._missing[need]

    def is_over(self, need: Need) -> bool:
        """True when such a request shall wait no longer."""
        return need in self._over

    def close(self) -> None:
        """No timer runs any more."""
        for need in Need:
            self._stop(need)

    def _stop(self, need: Need) -> None:
        self._over.discard(need)
        if timer := self._timers.pop(need, None):
            timer.cancel()

    def _end(self, need: Need) -> None:
        del self._timers[need]
        self._over.add(need)
        self._on_over()
