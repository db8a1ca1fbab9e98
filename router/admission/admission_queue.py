"""Requests that wait for workers with room: here, and not in an engine's queue (late binding).

Therefore a request is bound to the workers that are best when it is admitted, and not when it arrived, and no request loses
its place in a queue when a worker dies.
"""

import asyncio
import time

from contract.identity import Role
from router.admission.fair_queue import QueueOrder
from router.admission.lanes import Entry, Lanes, WaitingRequest
from router.admission.placements import Placements
from router.admission.reservation import Reservation
from router.admission.role_timeouts import RoleTimeouts
from router.admission.start_limiter import StartLimiter
from router.admission.unreachable_pairs import UnreachablePairs
from router.concurrency.change_signal import ChangeSignal
from router.routing.policy import Pairs, PlacementRequest, awaited
from router.routing.running_shares import RunningShares
from router.workers.registry import Registry


class AdmissionQueue:
    """Owns the requests that are bound to no worker, and decides when and where each of them is admitted.

    The next request of a lane is not overtaken by later ones of the lane. Requests of other lanes may be admitted meanwhile,
    but not to workers that it waits for: an embedding does not wait for a decode worker, nor a request that fits a small
    worker for a large one. If no worker has a role or is large enough, requests wait ``wait_seconds`` for it: one may be
    starting again. A client that holds its share of what runs (``shares``) is overtaken by other clients.
    """

    def __init__(
        self,
        registry: Registry,
        changes: ChangeSignal,
        unreachable: UnreachablePairs,
        shares: RunningShares,
        wait_seconds: float,
    ) -> None:
        self._registry = registry
        self._shares = shares
        self._role_timeouts = RoleTimeouts(wait_seconds, self._admit)
        self._lanes = Lanes(registry, wait_seconds, self._admit)
        self._placements = Placements(registry, unreachable, shares, StartLimiter(self._admit_soon))
        self._is_due = False
        changes.add_listener(self._admit_soon)
        changes.add_room_listener(self._on_more_room)

    def __len__(self) -> int:
        return len(self._lanes)

    def decisions(self) -> dict[str, int]:
        """Return how many requests were bound to workers, by the kinds of their legs, as in "prefill+decode"."""
        return {
            "+".join(dict.fromkeys(kinds)): number for kinds, number in self._placements.decisions.items()
        }

    def oldest_waits(self) -> dict[Role, float]:
        """Return for how many seconds the oldest request has waited for workers, by the roles that it needs."""
        return self._lanes.oldest_waits(time.monotonic())

    async def reserve(
        self, request: PlacementRequest, order: QueueOrder, deadline: float | None = None
    ) -> Reservation:
        """Wait for workers with room, and hold their credit until the reservation's block ends or legs have taken it over.

        The reservation may be for fewer choices than the request has (``RunningShares``).

        Raises UnavailableError when a role that is needed, or a worker that is large enough, has been missing for
        ``wait_seconds``; at once if workers have rejected the request because of its size and no other one is attached.
        Raises TimeoutError at the deadline, if there is one.
        """
        self._shares.note(order.tenant)
        return self._reserve_at_once(request, order) or await self._wait(request, order, deadline)

    def close(self) -> None:
        """Stop all timers, since the router stops."""
        self._role_timeouts.close()
        self._lanes.close()

    def _reserve_at_once(self, request: PlacementRequest, order: QueueOrder) -> Reservation | None:
        """Reserve workers for a request that need not wait: no other one waits, and they have room."""
        if self._lanes:
            return None
        self._role_timeouts.update(self._registry.views)
        if self._role_timeouts.missing(request.least_plan):
            return None
        placements = self._placements
        if not placements.may_start(request, order, placements.total_credit()):
            return None
        if reservation := placements.reserve(request, order, placements.blocked_pairs()):
            self._lanes.charge(order, reservation.num_choices / request.num_choices)
        return reservation

    async def _wait(
        self, request: PlacementRequest, order: QueueOrder, deadline: float | None
    ) -> Reservation:
        """Queue a request until it is admitted. Raises the errors of ``reserve``."""
        loop = asyncio.get_running_loop()
        waiting = WaitingRequest(request, loop.create_future())
        entry = self._lanes.add(waiting, order)
        timer: asyncio.TimerHandle | None = None
        if deadline is not None:
            timer = loop.call_later(max(0.0, deadline - time.monotonic()), waiting.fail, TimeoutError())
        try:
            if self._may_change_something(entry):
                self._admit()
            return await waiting.reservation
        except BaseException:
            self._leave(entry)
            raise
        finally:
            if timer:
                timer.cancel()
            waiting.stop_timer()

    def _leave(self, entry: Entry) -> None:
        """Release what a request has reserved, or remove it if it still waits."""
        waiting = entry.item
        if waiting.is_queued:
            was_head = self._lanes.is_head(entry, self._placements.start_rule())
            self._lanes.discard(entry)
            if was_head:
                self._admit()
        reserved = waiting.reservation
        if reserved.done() and not reserved.cancelled() and reserved.exception() is None:
            reserved.result().release()

    def _may_change_something(self, entry: Entry) -> bool:
        """Return False for a request behind one that waits for room: its arrival admits nothing."""
        is_head = self._lanes.is_head(entry, self._placements.start_rule())
        return is_head or self._role_timeouts.missing(entry.item.request.least_plan) is not None

    def _on_more_room(self) -> None:
        if self._lanes:
            self._admit_soon()

    def _admit_soon(self) -> None:
        """Admit requests once in the next round of the event loop, however many changes there are until then."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._admit)

    def _admit(self) -> None:
        """Admit the next requests of the lanes for as long as there is room."""
        self._is_due = False
        workers = self._registry.views
        self._role_timeouts.update(workers)
        self._lanes.sort(workers)
        if not self._lanes:
            return
        unreachable = self._placements.blocked_pairs()
        while self._lanes and self._admit_one(unreachable):
            pass
        if self._role_timeouts.any_expired:
            self._lanes.fail_expired(self._role_timeouts)

    def _admit_one(self, unreachable: Pairs) -> bool:
        """Admit the first request that has room. Workers that an earlier one waits for are taken as full."""
        workers = self._registry.views
        taken: frozenset[str] = frozenset()
        before: PlacementRequest | None = None
        for entry in self._lanes.heads(self._placements.start_rule()):
            request = entry.item.request
            if entry.item.reservation.done():
                self._lanes.discard(entry)
                return True
            if not entry.lane.workers or self._role_timeouts.missing(entry.lane.plan):
                continue
            if before:
                taken |= awaited(workers, before, taken)
            if reservation := self._placements.reserve(request, entry.order, unreachable, taken):
                self._lanes.admit(entry, reservation)
                return True
            before = request
        return False
