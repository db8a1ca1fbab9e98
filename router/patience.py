"""How long requests wait for a role that no worker has: one may be starting again."""

import asyncio
from collections.abc import Callable, Sequence

from router.policy import WorkerView, missing_role


class Patience:
    """Knows since when new requests, and since when replays, which need less, lack a role.

    seconds: how long a role may have no worker at all. on_over: called when that time has passed for one of the two.
    """

    def __init__(self, seconds: float, on_over: Callable[[], None]) -> None:
        self._seconds = seconds
        self._on_over = on_over
        self._missing: dict[bool, str | None] = dict.fromkeys((False, True), "no worker was ever attached")
        self._timers: dict[bool, asyncio.TimerHandle] = {}
        self._over: set[bool] = set()

    def look(self, workers: Sequence[WorkerView]) -> None:
        """Take note of what is missing now; between two looks nothing changes."""
        for is_replay in (False, True):
            self._missing[is_replay] = missing = missing_role(workers, is_replay=is_replay)
            if missing is None:
                self._stop(is_replay)
            elif is_replay not in self._timers and is_replay not in self._over:
                loop = asyncio.get_running_loop()
                self._timers[is_replay] = loop.call_later(self._seconds, self._end, is_replay)

    def missing(self, is_replay: bool) -> str | None:
        """What such a request lacks; None when it can be placed sooner or later."""
        return self._missing[is_replay]

    def is_over(self, is_replay: bool) -> bool:
        """True when such a request shall wait no longer."""
        return is_replay in self._over

    def close(self) -> None:
        """No timer runs any more."""
        for is_replay in (False, True):
            self._stop(is_replay)

    def _stop(self, is_replay: bool) -> None:
        self._over.discard(is_replay)
        if timer := self._timers.pop(is_replay, None):
            timer.cancel()

    def _end(self, is_replay: bool) -> None:
        del self._timers[is_replay]
        self._over.add(is_replay)
        self._on_over()
