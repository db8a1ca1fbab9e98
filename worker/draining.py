"""The drain of a worker: no new legs, time for those that are bound, and no request fails.

1. ``begin``, for SIGTERM, the admin port and the router's message alike: the routers receive a credit of nothing with
   the deadline, and ``/ready`` fails. ``/health`` does not.
2. Bound legs continue. When every router has answered that credit, answers may be moved to other workers
   (``worker/settling.py``). The router takes the legs that are left to other workers at the deadline.
3. The worker is empty when it holds no leg and lends no KV. The routers receive a credit with ``is_empty``, and report that
   no leg is bound (``worker/emptiness.py``).
4. After a signal the process ends then, or a moment after the deadline, or at a second signal. Otherwise it stays until
   ``undo``, which lets it serve again, or until a signal. A drain that is forgotten undoes itself after ``hold_seconds``.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from msgspec.structs import replace

from contract.membership import Credit
from serving.waiting import ends_within
from worker.emptiness import Emptiness
from worker.lifecycle import Lifecycle
from worker.settling import Settling

logger = logging.getLogger(__name__)

TAKEN_AWAY_SECONDS = 5.0
"""The time after the deadline in which the router takes the legs away that are left."""


class Drain:
    """Drains one worker. Owns the deadline.

    announce: called when the credit has changed. default_seconds: the time for legs if none is given. hold_seconds: the
    time after the deadline until the worker serves again.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        emptiness: Emptiness,
        settling: Settling,
        announce: Callable[[], None],
        default_seconds: float,
        hold_seconds: float,
    ) -> None:
        self._lifecycle = lifecycle
        self._emptiness = emptiness
        self._settling = settling
        self._announce = announce
        self._default_seconds = default_seconds
        self._hold_seconds = hold_seconds
        self._deadline = 0.0
        self._release: asyncio.TimerHandle | None = None

    @property
    def reason(self) -> str | None:
        """The reason why the worker gets no new legs; None without a drain."""
        return "the worker is draining" if self._lifecycle.is_draining else None

    @property
    def is_empty(self) -> bool:
        """True while a drain is on and the worker holds no leg and lends no KV."""
        return self._emptiness.is_empty

    @property
    def seconds_left(self) -> float:
        """Seconds until the legs that are left are taken away."""
        return max(0.0, self._deadline - time.monotonic())

    def credit(self, full: Credit) -> Credit:
        """Return the credit to send: ``full``, or nothing during a drain."""
        credit = self._lifecycle.credit(full)
        if not credit.is_draining:
            return credit
        return replace(credit, drain_seconds=self.seconds_left, is_empty=self.is_empty)

    def begin(self, seconds: float | None = None, *, by: str) -> None:
        """Take no new legs; those that are bound have ``seconds``, or less if an earlier deadline is set.

        The worker serves again ``hold_seconds`` after the deadline, counted anew from each call, unless its process is to
        end. by: who asks for it, for the log. Raises UnavailableError if the worker has left.
        """
        deadline = time.monotonic() + (self._default_seconds if seconds is None else seconds)
        if self._lifecycle.is_draining:
            self._deadline = min(self._deadline, deadline)
        else:
            self._lifecycle.drain()
            self._deadline = deadline
            self._emptiness.watch()
        logger.info("draining, ordered by %s: legs have up to %.1f s", by, self.seconds_left)
        self._hold()
        self._announce()
        self._settling.watch()

    def undo(self, *, by: str) -> None:
        """Serve again. by: who asks for it, for the log. Raises UnavailableError if the process is to end."""
        was_draining = self._lifecycle.is_draining
        self._lifecycle.undrain()
        self.close()
        if was_draining:
            logger.info("the drain was cancelled by %s; serving again", by)
        self._announce()

    def leg_accepted(self) -> None:
        """Record a leg that was sent before its router received the drain's credit: the worker is not empty any more."""
        if self.is_empty:
            self._emptiness.watch()
            self._announce()

    async def wait_empty(self, seconds: float) -> bool:
        """Wait until the worker is empty, at most ``seconds``; return whether it is."""
        return await self._emptiness.wait_empty(seconds)

    async def stop(self, at_once: asyncio.Event) -> None:
        """Drain for good; return when no leg is bound, or the legs had their time, or at ``at_once``."""
        self._lifecycle.is_stopping = True
        self.begin(by="a signal")
        seconds = self.seconds_left + TAKEN_AWAY_SECONDS
        if not await ends_within(self._emptiness.wait_unbound(), seconds, at_once):
            logger.warning("legs are left to other workers: the worker had to end now")

    def close(self) -> None:
        """Stop watching for emptiness, and for the end of the hold. Does nothing the second time."""
        self._emptiness.close()
        self._cancel_release()

    def _hold(self) -> None:
        """Set the moment at which the worker serves again; none if its process is to end."""
        self._cancel_release()
        if not self._lifecycle.is_stopping:
            seconds = self.seconds_left + self._hold_seconds
            self._release = asyncio.get_running_loop().call_later(seconds, self._serve_again)

    def _serve_again(self) -> None:
        self.undo(
            by=f"its deadline: the order was not renewed for {self._hold_seconds:g} s (drain_hold_seconds)"
        )

    def _cancel_release(self) -> None:
        if self._release:
            self._release.cancel()
            self._release = None
