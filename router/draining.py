"""A planned end of the router: no new requests, time for those that run, then one clear error each.

1. ``begin``: new requests are refused with 503, ``/ready`` fails, ``/health`` does not.
2. Running answers, and everything else that HTTP clients are being answered (uploads and downloads of files among it), go
   on until they end, ``drain_seconds`` have passed, or the operator asks again (a second signal).
3. Those that are left end with UnavailableError: an event in a stream, a status elsewhere.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from contract.errors import UnavailableError
from router.cancellation import CancellableRequests
from router.request_tracker import RequestTracker

logger = logging.getLogger(__name__)

_LAST_WORDS_SECONDS = 1.0
"""How long requests that were ended may take to send their error."""


class Drain:
    """Owns whether this router drains. ``run`` is called once, when it is to stop.

    until_answered: blocks until HTTP clients have all that they have asked for.
    """

    def __init__(
        self,
        tracker: RequestTracker,
        running: CancellableRequests,
        until_answered: Callable[[], Awaitable[None]],
        drain_seconds: float,
    ) -> None:
        self._tracker = tracker
        self._running = running
        self._until_answered = until_answered
        self._seconds = drain_seconds
        self.is_on = False

    @property
    def reason(self) -> str | None:
        """Why no new request is taken; None before the drain."""
        return "the router is stopping" if self.is_on else None

    def begin(self) -> None:
        """Refuse new requests from now on."""
        self.is_on = True
        self._tracker.close_admission(
            "the router is stopping and takes no new requests; send the request again"
        )

    async def run(self, at_once: asyncio.Event) -> None:
        """Wait until no request is left, and end those that are left after ``drain_seconds`` or at ``at_once``."""
        logger.info("draining: %d requests have up to %g s to end", self._tracker.num_held, self._seconds)
        if not await self._is_idle_within(self._seconds, at_once):
            logger.warning(
                "%d requests are ended: they were not done when the router had to stop",
                self._running.num_open,
            )
            self._running.end_all(
                UnavailableError("the router stopped before the answer was complete; send the request again")
            )
            await self._is_idle_within(_LAST_WORDS_SECONDS, asyncio.Event())

    async def _is_idle_within(self, seconds: float, at_once: asyncio.Event) -> bool:
        """Wait until nothing is left, for ``seconds`` or until ``at_once``; whether nothing is."""
        idle = asyncio.create_task(self._wait_idle(), name="wait until no request is left")
        waits = [idle, asyncio.create_task(at_once.wait(), name="wait for a second signal")]
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        is_idle = idle.done()
        for task in waits:
            task.cancel()
        await asyncio.wait(waits)
        return is_idle

    async def _wait_idle(self) -> None:
        await self._tracker.wait_idle()
        await self._until_answered()
