"""Pauses after work for one client, so that its work leaves most of the time to the other clients."""

import asyncio
import math
import time

WORK_FACTOR = 3
"""The length of a pause, as a multiple of the work before it."""
MAX_PAUSE_SECONDS = 0.02
"""The longest pause between two requests of one client."""


def pause_seconds(work_seconds: float, factor: float = WORK_FACTOR) -> float:
    """Return how long a client's next request waits after ``work_seconds`` of work for its last one."""
    return min(factor * work_seconds, MAX_PAUSE_SECONDS)


class Throttle:
    """Leaves three quarters of the event loop's time to others. Made before a piece of work begins."""

    def __init__(self, max_seconds: float = math.inf) -> None:
        self._max_seconds = max_seconds
        self._began = time.monotonic()

    async def after_work(self) -> None:
        """Sleep for three times as long as the work took since the last pause, for ``max_seconds`` at most."""
        await asyncio.sleep(min(WORK_FACTOR * (time.monotonic() - self._began), self._max_seconds))
        self._began = time.monotonic()
