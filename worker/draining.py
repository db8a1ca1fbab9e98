"""The drain of a worker: no new legs, time for those that are bound, and no request fails.

1. ``begin``, for SIGTERM, the admin port and the router's message alike: the routers receive a credit of nothing with
   the deadline, and ``/ready`` fails. ``/health`` does not.
2. Bound legs continue. The router may take them to other workers, and does so at the deadline with those that are left.
3. The worker is empty when it holds no leg and lends no KV. The routers receive a credit with ``is_empty``.
4. After a signal the process ends then, or a moment after the deadline, or at a second signal. Otherwise it stays until
   ``undo``, which lets it serve again, or until a signal.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from contract.errors import UnavailableError
from contract.membership import Credit
from engine.client import EngineClient
from worker.lifecycle import Lifecycle

logger = logging.getLogger(__name__)

TAKEN_AWAY_SECONDS = 5.0
"""The time after the deadline in which the router takes the legs away that are left."""


class Drain:
    """Drains one worker. Owns the deadline, and whether the worker is empty.

    num_legs: returns the number of legs that have not ended. announce: called when the credit has changed. default_seconds:
    the time for legs if none is given.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        engine: EngineClient,
        num_legs: Callable[[], int],
        announce: Callable[[], None],
        default_seconds: float,
    ) -> None:
        self._lifecycle = lifecycle
        self._engine = engine
        self._num_legs = num_legs
        self._announce = announce
        self._default_seconds = default_seconds
        self._deadline = 0.0
        self._empty = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None

    @property
    def reason(self) -> str | None:
        """The reason why the worker gets no new legs; None without a drain."""
        return "the worker is draining" if self._lifecycle.is_draining else None

    @property
    def is_empty(self) -> bool:
        """True while a drain is on and the worker holds no leg and lends no KV."""
        return self._empty.is_set()

    @property
    def seconds_left(self) -> float:
        """Seconds until the legs that are left are taken away."""
        return max(0.0, self._deadline - time.monotonic())

    def credit(self, full: Credit) -> Credit:
        """Return the credit to send: ``full``, or nothing during a drain."""
        if not self._lifecycle.is_draining:
            return full
        return Credit(is_draining=True, drain_seconds=self.seconds_left, is_empty=self.is_empty)

    def begin(self, seconds: float | None = None) -> None:
        """Take no new legs; those that are bound have ``seconds``, or less if an earlier deadline is set.

        Raises UnavailableError if the worker has left.
        """
        seconds = self._default_seconds if seconds is None else seconds
        deadline = time.monotonic() + seconds
        if self._lifecycle.is_draining:
            self._deadline = min(self._deadline, deadline)
        else:
            self._lifecycle.drain()
            self._deadline = deadline
            self._watch_again()
        logger.info("draining: %d legs have up to %.1f s", self._num_legs(), self.seconds_left)
        self._announce()

    def undo(self) -> None:
        """Serve again. Raises UnavailableError if the process is to end."""
        self._lifecycle.undrain()
        self.close()
        self._empty.clear()
        logger.info("the drain is undone")
        self._announce()

    def leg_accepted(self) -> None:
        """Record a leg that was sent before its router received the drain's credit: the worker is not empty any more."""
        if self.is_empty:
            self._empty.clear()
            self._watch_again()
            self._announce()

    async def wait_empty(self, seconds: float | None) -> bool:
        """Wait until the worker is empty, at most ``seconds`` (None: without a limit); return whether it is."""
        try:
            async with asyncio.timeout(seconds):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    async def stop(self, at_once: asyncio.Event) -> None:
        """Drain for good; return when the worker is empty, or its legs had their time, or at ``at_once``."""
        self._lifecycle.is_stopping = True
        self.begin()
        waits = [
            asyncio.create_task(self.wait_empty(self.seconds_left + TAKEN_AWAY_SECONDS), name="drain"),
            asyncio.create_task(at_once.wait(), name="wait for a second signal"),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
            await asyncio.wait(waits)
        if not self.is_empty:
            logger.warning("%d legs are left to other workers: they had to end now", self._num_legs())

    def close(self) -> None:
        """Stop watching for emptiness. Does nothing the second time."""
        if self._watch:
            self._watch.cancel()
            self._watch = None

    def _watch_again(self) -> None:
        self.close()
        self._watch = asyncio.create_task(self._until_empty(), name="watch whether the worker is empty")

    async def _until_empty(self) -> None:
        """Announce that the worker is empty, once it is. An engine that is gone holds nothing."""
        try:
            await self._engine.until_free()
            while self._num_legs():  # legs whose last output is delivered, but not processed
                await self._engine.until_free()
        except UnavailableError:
            pass
        self._empty.set()
        self._announce()
