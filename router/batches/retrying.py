"""Calls of the folder that are repeated until the disk accepts them."""

import logging
from collections.abc import Callable
from itertools import count
from typing import TypeVar

from contract.errors import UnavailableError
from router.batches.run_context import Pause
from router.batches.storage import Storage

logger = logging.getLogger(__name__)

T = TypeVar("T")
_LONGEST_PAUSE_SECONDS = 30.0


class RetryingStorage:
    """Runs the folder's calls for one batch, named in the log. A full or broken disk delays the batch and loses nothing."""

    def __init__(self, storage: Storage, pause: Pause, batch_id: str) -> None:
        self._storage = storage
        self._pause = pause
        self._batch_id = batch_id

    async def run(self, work: Callable[..., T], *args: object) -> T:
        """Return the result of ``work``, called on the folder's thread, again as long as the disk fails."""
        for attempt in count():
            try:
                return await self._storage.run(work, *args)
            except UnavailableError as error:
                logger.error("batch %s waits: %s", self._batch_id, error.message)
            await self._pause(pause_seconds(attempt))
        raise AssertionError("unreachable")


def pause_seconds(attempt: int) -> float:
    """Return the pause after the attempt with this number: 1, 2, 4, ... seconds."""
    return min(2.0 ** min(attempt, 10), _LONGEST_PAUSE_SECONDS)
