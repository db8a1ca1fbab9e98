"""The planned end of a router: no new requests, time for those that run, then one clear error for each that is left.

1. ``begin``: new requests are rejected with 503, and ``/ready`` fails. ``/health`` does not.
2. Running answers continue, and so does everything else that HTTP clients receive (uploads and downloads of files among it),
   until all of it ends, ``drain_seconds`` have passed, or the operator asks again (a second signal).
3. Those that are left end with UnavailableError: an event in a stream, a status elsewhere.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from contract.errors import UnavailableError
from router.attempts.request_tracker import RequestTracker
from router.intake.cancellation import CancellableRequests
from serving.event_loop import ends_within

logger = logging.getLogger(__name__)

_ERROR_SECONDS = 1.0
"""The time in which ended requests may send their error."""


class Drain:
    """Drains this router once, before it stops. is_on: it has begun.

    until_answered: blocks until HTTP clients have received all responses.
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
        """The reason why new requests are rejected; None before the drain."""
        return "the router is stopping" if self.is_on else None

    def begin(self) -> None:
        """Reject new requests from now on."""
        self.is_on = True
        # requests in the background are not rejected by it: no line of a batch begins while the drain is on
        self._tracker.admission.close(
            "the router is stopping and takes no new requests; send the request again"
        )

    async def run(self, at_once: asyncio.Event) -> None:
        """Wait until no request is left. After ``drain_seconds``, or at ``at_once``, end those that are left."""
        logger.info("draining: %d requests have up to %g s to end", self._tracker.num_held, self._seconds)
        if not await ends_within(self._wait_idle(), self._seconds, at_once):
            logger.warning(
                "%d requests are ended: they were not done when the router had to stop",
                self._running.num_open,
            )
            self._tracker.end_all()
            self._running.end_all(
                UnavailableError("the router stopped before the answer was complete; send the request again")
            )
            await ends_within(self._wait_idle(), _ERROR_SECONDS, asyncio.Event())

    async def _wait_idle(self) -> None:
        await self._tracker.wait_idle()
        await self._until_answered()
