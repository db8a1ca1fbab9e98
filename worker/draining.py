"""The drain of a worker: no new legs, time for those that are bound, and no request fails.

1. ``begin``, for SIGTERM, the admin port and the router's message alike: the routers receive a credit of nothing with
   the deadline, and ``/ready`` fails. ``/health`` does not.
2. Bound legs continue. When every router has answered that credit, answers may be moved to other workers
   (``worker/settling.py``). The router takes the legs that are left to other workers at the deadline.
3. The worker is empty when it holds no leg and lends no KV. The routers receive a credit with ``is_empty``, and report that
   no leg is bound (``Emptiness``).
4. After a signal the process ends then, or a moment after the deadline, or at a second signal. Otherwise it stays until
   ``undo``, which lets it serve again, or until a signal. A drain that is forgotten undoes itself after ``hold_seconds``.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from msgspec.structs import replace

from contract.errors import UnavailableError
from contract.membership import Credit
from engine.client import EngineClient
from serving.event_loop import ends_within
from worker.lifecycle import Lifecycle
from worker.settling import Settling

logger = logging.getLogger(__name__)


_ASK_AGAIN_SECONDS = 0.2
"""The time after which a router that has a leg on its way is asked again what it has bound."""
TAKEN_AWAY_SECONDS = 5.0
"""The time after the deadline in which the router takes the legs away that are left."""


class Emptiness:
    """Finds out when a draining worker holds nothing any more, and when nothing is on its way to it either.

    It watches between ``watch`` and ``close``. is_empty: the worker holds no leg and lends no KV. Then its routers are asked
    what they have bound; ``unbound`` is set when that is nothing. Without this a leg could be on its way, and would fail
    with the worker. num_legs: returns the number of legs that have not ended. is_bound: returns whether a router may have a
    leg bound to this worker. announce: sends a credit, to which each router answers what it has bound.
    """

    def __init__(
        self,
        engine: EngineClient,
        num_legs: Callable[[], int],
        is_bound: Callable[[], bool],
        announce: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._num_legs = num_legs
        self._is_bound = is_bound
        self._announce = announce
        self._empty = asyncio.Event()
        self.unbound = asyncio.Event()
        self._reported = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None

    @property
    def is_empty(self) -> bool:
        """True from the moment at which the worker was found to be empty."""
        return self._empty.is_set()

    def watch(self) -> None:
        """Begin, or begin again: the worker holds something."""
        self.close()
        self._watch = asyncio.create_task(self._until_unbound(), name="watch whether the worker is empty")

    def close(self) -> None:
        """Stop watching, and forget what was found. Does nothing the second time."""
        if self._watch:
            self._watch.cancel()
            self._watch = None
        self._empty.clear()
        self.unbound.clear()

    def note_report(self) -> None:
        """Record that a router has reported what it has bound."""
        self._reported.set()

    async def wait_empty(self, seconds: float) -> bool:
        """Wait until the worker is empty, at most ``seconds``; return whether it is."""
        return await _is_set_within(self._empty, seconds)

    async def _until_unbound(self) -> None:
        """Announce that the worker is empty, once it is, and wait for its routers.

        An engine that is gone holds nothing, and legs that are bound to it fail with the worker's streams.
        """
        has_engine = True
        try:
            await self._engine.until_free()
            while self._num_legs():  # legs whose last output is delivered, but not processed
                await self._engine.until_free()
        except UnavailableError:
            has_engine = False
        self._empty.set()
        self._announce()
        while has_engine and self._is_bound():
            self._reported.clear()
            if not await _is_set_within(self._reported, _ASK_AGAIN_SECONDS):
                self._announce()
        self.unbound.set()
        self._watch = None


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event, at most ``seconds``; return whether it is set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


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
        # A later order may shorten the time of an earlier one, as a signal does, and never extend it.
        if self._lifecycle.is_draining:
            self._deadline = min(self._deadline, deadline)
        else:
            self._lifecycle.drain()
            self._deadline = deadline
            self._emptiness.watch()
        logger.info("draining, ordered by %s: legs have up to %.1f s", by, self.seconds_left)
        self._cancel_release()
        if not self._lifecycle.is_stopping:
            left = self.seconds_left + self._hold_seconds
            by_itself = (
                f"its deadline: the order was not renewed for {self._hold_seconds:g} s (drain_hold_seconds)"
            )
            undo = partial(self.undo, by=by_itself)
            self._release = asyncio.get_running_loop().call_later(left, undo)
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

    def on_leg_accepted(self) -> None:
        """Record a leg that was sent before its router received the drain's credit: the worker is not empty any more."""
        if self.is_empty:
            self._emptiness.watch()
            self._announce()

    async def wait_empty(self, seconds: float) -> bool:
        """Wait until the worker is empty, at most ``seconds``; return whether it is."""
        return await self._emptiness.wait_empty(seconds)

    async def stop(self, at_once: asyncio.Event) -> None:
        """Drain for good; return when no leg is bound, or the legs had their time, or at ``at_once``."""
        self._lifecycle.is_stopping = (
            True  # first, so that ``begin`` sets no time at which the worker serves again
        )
        self.begin(by="a signal")
        seconds = self.seconds_left + TAKEN_AWAY_SECONDS
        if not await ends_within(self._emptiness.unbound.wait(), seconds, at_once):
            logger.warning("legs are left to other workers: the worker had to end now")

    def close(self) -> None:
        """Stop watching for emptiness, and for the end of the hold. Does nothing the second time."""
        self._emptiness.close()
        self._cancel_release()

    def _cancel_release(self) -> None:
        if self._release:
            self._release.cancel()
            self._release = None
