"""Waiting requests, sorted by the workers that they fit, and time limits for those that fit none or lack a role."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import structs

from contract.errors import UnavailableError
from contract.identity import Role
from router.admission.fair_queue import FairQueue, QueueEntry, QueueOrder, StartRule
from router.admission.reservation import Reservation
from router.intake.request import BACKGROUND_PRIORITY
from router.routing.legs import PLANS, RequestPlan
from router.routing.policy import PlacementRequest, candidates, missing_role, why_too_long
from router.routing.views import WorkerViews
from router.workers.registry import Registry


class RoleTimeouts:
    """Owns a timer for each plan that lacks a role: an embedding lacks less than an answer, and so does a replay.

    seconds: how long a role may have no worker. on_expired: called when that time has passed for one of the plans.
    expired: the plans whose requests must not wait any longer.
    """

    def __init__(self, seconds: float, on_expired: Callable[[], None]) -> None:
        self._seconds = seconds
        self._on_expired = on_expired
        self._missing: dict[RequestPlan, str | None] = dict.fromkeys(PLANS, "no worker was ever attached")
        self._timers: dict[RequestPlan, asyncio.TimerHandle] = {}
        self.expired: set[RequestPlan] = set()
        self._version: int | None = None

    def update(self, workers: WorkerViews) -> None:
        """Start the timer of each plan that lacks a role now, and stop the others."""
        if workers.version == self._version:
            return
        # this runs at every decision, but what a plan lacks changes only with the version
        self._version = workers.version
        for plan in PLANS:
            self._missing[plan] = missing = missing_role(workers.sizes, plan)
            if missing is None:
                self._stop(plan)
            # an expired plan stays so until its role has a worker: what arrives meanwhile fails at once
            elif plan not in self._timers and plan not in self.expired:
                loop = asyncio.get_running_loop()
                self._timers[plan] = loop.call_later(self._seconds, self._expire, plan)

    def missing(self, plan: RequestPlan) -> str | None:
        """Describe what a request of this plan lacks; return None if it can be placed sooner or later."""
        return self._missing[plan]

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
        self.expired.discard(plan)
        if timer := self._timers.pop(plan, None):
            timer.cancel()

    def _expire(self, plan: RequestPlan) -> None:
        del self._timers[plan]
        self.expired.add(plan)
        self._on_expired()


class Lane(NamedTuple):
    """The requests that have the same plan and fit the same workers. is_apart: some of these are full for them only."""

    plan: RequestPlan
    workers: frozenset[str]
    is_apart: bool = False


@dataclass(eq=False)
class WaitingRequest:
    """One request that waits for ``reservation``. timer: runs while the request fits no attached worker.

    since: when the wait began, by the monotonic clock.
    """

    request: PlacementRequest
    reservation: asyncio.Future[Reservation]
    timer: asyncio.TimerHandle | None = None
    is_queued: bool = True
    since: float = field(default_factory=time.monotonic)

    def stop_timer(self) -> None:
        """Stop the timer, if it runs."""
        if self.timer:
            self.timer.cancel()
            self.timer = None

    def fail(self, error: Exception) -> None:
        """End the wait with an error, unless it has ended already."""
        if not self.reservation.done():
            self.reservation.set_exception(error)


Entry = QueueEntry[Lane, WaitingRequest]


class Lanes:
    """Owns the waiting requests, sorted by the workers that they fit. ``FairQueue`` orders those of a lane.

    A request that fits no attached worker fails after ``wait_seconds``, or may be shortened to what fits. on_shortened:
    called then.
    """

    def __init__(self, registry: Registry, wait_seconds: float, on_shortened: Callable[[], None]) -> None:
        self._registry = registry
        self._wait_seconds = wait_seconds
        self._on_shortened = on_shortened
        self._queue: FairQueue[Lane, WaitingRequest] = FairQueue()
        self._sorted_version: int | None = None

    def __len__(self) -> int:
        return self._queue.num_waiting

    def add(self, waiting: WaitingRequest, order: QueueOrder) -> Entry:
        """Queue a request."""
        return self._queue.add(self._lane_of(waiting, self._registry.views), order, waiting)

    def oldest_waits(self, now: float) -> dict[Role, float]:
        """Return for how many seconds the oldest request has waited, by the roles that requests need.

        Requests in the background do not count.
        """
        oldest: dict[Role, float] = {}
        for entry in self._queue:
            if entry.order.priority != BACKGROUND_PRIORITY:
                for role in entry.lane.plan.roles:
                    oldest[role] = max(oldest.get(role, 0.0), now - entry.item.since)
        return oldest

    def is_head(self, entry: Entry, may_start: StartRule[Lane, WaitingRequest]) -> bool:
        """Return True if the request is the next one of its lane."""
        return self._queue.head(entry.lane, may_start) is entry

    def heads(self, may_start: StartRule[Lane, WaitingRequest]) -> list[Entry]:
        """Return the next request of each lane, in the order in which they are admitted."""
        return self._queue.heads(may_start)

    def admit(self, entry: Entry, reservation: Reservation) -> None:
        """End the wait of a request with its reservation. Its client is charged for the choices that begin."""
        self._queue.admit(entry, reservation.num_choices / entry.item.request.num_choices)
        entry.item.is_queued = False
        entry.item.reservation.set_result(reservation)

    def charge(self, order: QueueOrder, part: float) -> None:
        """Count a part of the cost of a request that is admitted without a wait, while no other one waits."""
        self._queue.charge(order, part)

    def discard(self, entry: Entry) -> None:
        """Remove a request that is not admitted."""
        self._queue.discard(entry)
        entry.item.is_queued = False

    def fail_expired(self, timeouts: RoleTimeouts) -> None:
        """Remove the requests that must not wait for a role any longer, and end their waits with an error."""
        for entry in list(self._queue):
            plan = entry.item.request.least_plan
            if plan in timeouts.expired:
                self.discard(entry)
                entry.item.fail(timeouts.error(plan))

    def sort(self, workers: WorkerViews) -> None:
        """Move the requests whose lane has changed, because workers came, left, or take other sizes."""
        if workers.version == self._sorted_version:
            return
        self._sorted_version = workers.version
        for entry in list(self._queue):
            lane = self._lane_of(entry.item, workers)
            if lane != entry.lane:
                self._queue.move(entry, lane)

    def close(self) -> None:
        """Stop all timers."""
        for entry in self._queue:
            entry.item.stop_timer()

    def _lane_of(self, waiting: WaitingRequest, workers: WorkerViews) -> Lane:
        """Return the lane of a request. Its timer runs while it fits no worker."""
        request = waiting.request
        found = candidates(workers, request)
        if found or missing_role(workers.sizes, request.least_plan):  # a missing role has its own timeout
            waiting.stop_timer()
        elif waiting.timer is None and not waiting.reservation.done():
            # a worker has rejected it because of its size, so to wait until that one starts again would not help
            seconds = 0.0 if request.too_small else self._wait_seconds
            waiting.timer = asyncio.get_running_loop().call_later(seconds, self._give_up, waiting)
        return Lane(request.least_plan, found, request.full is not None)

    def _give_up(self, waiting: WaitingRequest) -> None:
        """End the wait of a request that has fitted no worker for too long, or let a smaller worker cut its answer."""
        waiting.timer = None
        request = waiting.request
        if request.may_be_cut and request.max_length:
            waiting.request = structs.replace(request, max_length=0)
            # its lane is found anew though no worker has changed
            self._sorted_version = None
            self._on_shortened()
        else:
            why = why_too_long(self._registry.views, request)
            waiting.fail(UnavailableError(f"no worker is ready: {why}; shorten it, or try again later"))
