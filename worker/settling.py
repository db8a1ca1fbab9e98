"""Follows whether a worker may lend and fetch KV at once, which two workers must not do with each other (law 4).

A worker that changes its role has legs of both roles for a while, and a draining one lends the KV of its answers while its
last fetches end. Routers bind by what they have received, so each change has the same order:

1. The worker sends a credit of nothing, and waits until every router has answered it. From then on no router binds a leg by
   the worker's former state.
2. It is unsettled, and reports that with the role, or the drain, that lets it lend and fetch at once. No router sees the new
   state without this report.
3. It is settled when every router has reported that nothing of the former state is left, and the engine has nothing either.
   A router reports that in its answer to a credit, or later on its own.

Routers bind no hand-over between two unsettled workers, and move no answer to one (``router/routing/policy.py``,
``router/migration/migrator.py``).
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from worker.lifecycle import Lifecycle, RouterAnswers, SettlingStep, next_settling_step


class RouterLinks(RouterAnswers, Protocol):
    """The worker's routers."""

    def send_credit(self) -> None:
        """Send every router its credit."""

    def send_role(self) -> None:
        """Report the worker's role to every router."""


class Settling:
    """Owns the way of one worker between settled and unsettled; ``worker/lifecycle.py`` has the decisions.

    settled: set while the worker is. has_mixed_kv: returns whether the engine lends KV beside the fetches of its role, or
    fetches beside its leases.
    """

    def __init__(
        self, lifecycle: Lifecycle, routers: Callable[[], RouterLinks], has_mixed_kv: Callable[[], bool]
    ) -> None:
        self._lifecycle = lifecycle
        self._routers = routers
        self._has_mixed_kv = has_mixed_kv
        self._reported = asyncio.Event()
        self.settled = asyncio.Event()
        self.settled.set()
        self._watch: asyncio.Task[None] | None = None

    @property
    def answers(self) -> RouterAnswers:
        """The routers' answers to the last credits."""
        return self._routers()

    def note_report(self) -> None:
        """Record that a router has reported what it holds, or is gone, or that the engine has reported its state."""
        self._reported.set()

    async def wait_answered(self) -> None:
        """Wait until every router has answered the last credit. Send that first."""
        while not self._routers().are_answered:
            await self._next_report()

    def watch(self) -> None:
        """Follow what is to be done: a drain has begun, or the worker has become unsettled."""
        if self._lifecycle.is_unsettled:
            self.settled.clear()
        if self._watch is None:  # one that runs decides anew after each report, and sees the new state then
            self._watch = asyncio.create_task(
                self._until_settled(), name="watch whether the worker is settled"
            )

    def close(self) -> None:
        """Stop watching. Does nothing the second time."""
        if self._watch:
            self._watch.cancel()
            self._watch = None

    async def _until_settled(self) -> None:
        """Decide again after each report until nothing is left of the former state."""
        lifecycle = self._lifecycle
        while (
            step := next_settling_step(lifecycle, self._routers(), self._has_mixed_kv)
        ) is not SettlingStep.END:
            match step:
                case SettlingStep.UNSETTLE:
                    lifecycle.is_unsettled = True
                    self.settled.clear()
                    self._routers().send_credit()
                case SettlingStep.SETTLE:
                    lifecycle.is_unsettled = False
                    self.settled.set()
                    self._routers().send_credit()
                case _:
                    await self._next_report()
        self._watch = None

    async def _next_report(self) -> None:
        # No report is lost: between the decision and this line nothing else runs.
        self._reported.clear()
        await self._reported.wait()
