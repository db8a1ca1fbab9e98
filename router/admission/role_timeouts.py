"""Time limits for requests that wait for a role which no worker has: one may be starting again."""

import asyncio
from collections.abc import Callable

from contract.errors import UnavailableError
from router.routing.legs import PLANS, RequestPlan
from router.routing.policy import missing_role
from router.routing.views import WorkerViews


class RoleTimeouts:
    """Owns a timer for each plan that lacks a role: an embedding lacks less than an answer, and so does a replay.

    seconds: how long a role may have no worker. on_expired: called when that time has passed for one of the plans.
    """

    def __init__(self, seconds: float, on_expired: Callable[[], None]) -> None:
        self._seconds = seconds
        self._on_expired = on_expired
        self._missing: dict[RequestPlan, str | None] = dict.fromkeys(PLANS, "no worker was ever attached")
        self._timers: dict[RequestPlan, asyncio.TimerHandle] = {}
        self._expired: set[RequestPlan] = set()
        self._version: int | None = None

    def update(self, workers: WorkerViews) -> None:
        """Start the timer of each plan that lacks a role now, and stop the others."""
        if workers.version == self._version:
            return
        self._version = workers.version
        for plan in PLANS:
            self._missing[plan] = missing = missing_role(workers.sizes, plan)
            if missing is None:
                self._stop(plan)
            elif plan not in self._timers and plan not in self._expired:
                loop = asyncio.get_running_loop()
                self._timers[plan] = loop.call_later(self._seconds, self._expire, plan)

    def missing(self, plan: RequestPlan) -> str | None:
        """Describe what a request of this plan lacks; return None if it can be placed sooner or later."""
        return self._missing[plan]

    @property
    def any_expired(self) -> bool:
        """True if requests of some plan must not wait any longer."""
        return bool(self._expired)

    def is_expired(self, plan: RequestPlan) -> bool:
        """Return True if requests of this plan must not wait any longer."""
        return plan in self._expired

    def error(self, plan: RequestPlan) -> UnavailableError:
        """Return the error of a request of this plan that must not wait any longer."""
        return UnavailableError(
            f"no worker is ready: {self._missing[plan]}, for {self._seconds:g} s; try again later"
        )

    def close(self) -> None:
        """Stop all timers."""
        for plan in PLANS:
            self._stop(plan)

    def _stop(self, plan: RequestPlan) -> None:
        self._expired.discard(plan)
        if timer := self._timers.pop(plan, None):
            timer.cancel()

    def _expire(self, plan: RequestPlan) -> None:
        del self._timers[plan]
        self._expired.add(plan)
        self._on_expired()
