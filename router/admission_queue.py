"""Requests that wait for workers with room: here, and not in an engine's queue (late binding).

Therefore a request is bound to the workers that are best when it is admitted, and not when it arrived, and no request loses
its place in a queue when a worker dies.
"""

import asyncio
import time
from collections.abc import Set

from router.change_signal import ChangeSignal
from router.fair_queue import QueueOrder, StartRule
from router.lanes import Entry, Lane, Lanes, WaitingRequest
from router.legs import CONTINUATION
from router.policy import Pairs, PlacementRequest, awaited, never_bound, place
from router.registry import Registry
from router.reservation import Reservation
from router.role_timeouts import RoleTimeouts
from router.running_shares import RunningShares, TotalCredit
from router.start_limiter import StartLimiter
from router.unreachable_pairs import UnreachablePairs

_NONE: frozenset[str] = frozenset()


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
        self._unreachable = unreachable
        self._shares = shares
        self._role_timeouts = RoleTimeouts(wait_seconds, self._admit)
        self._lanes = Lanes(registry, wait_seconds, self._admit)
        self._starts = StartLimiter(self._admit_soon)
        self._turn = 0
        self._is_due = False
        changes.add_listener(self._admit_soon)
        changes.add_room_listener(self._on_more_room)

    def __len__(self) -> int:
        return len(self._lanes)

    async def reserve(
        self, request: PlacementRequest, order: QueueOrder, deadline: float | None = None
    ) -> Reservation:
        """Wait for workers with room, and hold their credit until the reservation's block ends or legs have taken it over.

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
        if len(self._lanes):
            return None
        self._role_timeouts.update(self._registry.views)
        use = self._total_credit()
        if self._role_timeouts.missing(request.least_plan) or not self._may_start(request, order, use):
            return None
        reservation = self._place(request, order, use, self._blocked_pairs())
        if reservation:
            self._lanes.charge(order)
        return reservation

    async def _wait(
        self, request: PlacementRequest, order: QueueOrder, deadline: float | None
    ) -> Reservation:
        """Queue a request until it is admitted. Raises the errors of ``reserve``."""
        waiting = WaitingRequest(request, asyncio.get_running_loop().create_future())
        entry = self._lanes.add(waiting, order)
        try:
            if self._may_change_something(entry):
                self._admit()
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
                return await waiting.reservation
        except BaseException:
            self._leave(entry)
            raise
        finally:
            waiting.stop_timer()

    def _leave(self, entry: Entry) -> None:
        """Release what a request has reserved, or remove it if it still waits."""
        waiting = entry.item
        if waiting.is_queued:
            was_head = self._lanes.is_head(entry, self._start_rule(self._total_credit()))
            self._lanes.discard(entry)
            if was_head:
                self._admit()
        reserved = waiting.reservation
        if reserved.done() and not reserved.cancelled() and reserved.exception() is None:
            reserved.result().release()

    def _may_change_something(self, entry: Entry) -> bool:
        """Return False for a request behind one that waits for room: its arrival admits nothing."""
        is_head = self._lanes.is_head(entry, self._start_rule(self._total_credit()))
        return is_head or self._role_timeouts.missing(entry.item.request.least_plan) is not None

    def _start_rule(self, use: TotalCredit) -> StartRule[Lane, WaitingRequest]:
        """Return the rule by which a client that holds its share, or starts enough already, is overtaken."""
        return lambda entry: self._may_start(entry.item.request, entry.order, use)

    def _may_start(self, request: PlacementRequest, order: QueueOrder, use: TotalCredit) -> bool:
        """Return False for a request of a client that holds its share, or starts enough already."""
        if not self._starts.may_start(order.tenant):
            return False
        # Shares are of the workers that decode, and an answer that is moved holds its share already.
        if not request.plan.emits_tokens or request.plan is CONTINUATION:
            return True
        return self._shares.may_begin(order.tenant, request.num_choices, request.num_tokens, use)

    def _total_credit(self) -> TotalCredit:
        """Return the credit of the workers that decode, which bounds what each client runs and starts."""
        use = self._registry.decoding()
        self._starts.num_workers = use.num_workers
        return use

    def _on_more_room(self) -> None:
        if len(self):
            self._admit_soon()

    def _admit_soon(self) -> None:
        """Admit requests once in the next round of the event loop, however many changes there are until then."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._admit)

    def _admit(self) -> None:
        """Admit the next requests of the lanes for as long as there is room."""
        self._is_due = False
        self._role_timeouts.update(self._registry.views)
        self._lanes.sort(self._registry.views)
        if not len(self):
            return
        unreachable = self._blocked_pairs()
        while len(self) and self._admit_one(unreachable):
            pass
        if self._role_timeouts.any_expired:
            self._lanes.fail_expired(self._role_timeouts)

    def _blocked_pairs(self) -> Pairs:
        """Return the pairs of workers between which nothing is handed over now."""
        unreachable = never_bound(self._registry.views)
        if len(self._unreachable):
            unreachable |= self._unreachable.blocked(self._registry.workers)
        return unreachable

    def _admit_one(self, unreachable: Pairs) -> bool:
        """Admit the first request that has room. Workers that an earlier one waits for are taken as full."""
        workers = self._registry.views
        use = self._total_credit()
        taken: frozenset[str] = frozenset()
        before: PlacementRequest | None = None
        for entry in self._lanes.heads(self._start_rule(use)):
            request = entry.item.request
            if entry.item.reservation.done():
                self._lanes.discard(entry)
                return True
            if not entry.lane.workers or self._role_timeouts.missing(entry.lane.plan):
                continue
            if before:
                taken |= awaited(workers, before, taken)
            if reservation := self._place(request, entry.order, use, unreachable, taken):
                self._lanes.admit(entry, reservation)
                return True
            before = request
        return False

    def _place(
        self,
        request: PlacementRequest,
        order: QueueOrder,
        use: TotalCredit,
        unreachable: Pairs,
        taken: Set[str] = _NONE,
    ) -> Reservation | None:
        """Choose workers, hold their credit, and count the request as a start and as a probe of its pair.

        Returns None while no workers have room. taken: workers that count as full.
        """
        placement = place(self._registry.views, request, self._turn, unreachable, taken)
        if placement is None:
            return None
        self._turn += 1
        workers = [self._registry.get(leg.worker) for leg in placement.legs]
        if pair := placement.hand_over:
            self._unreachable.record_probe(*map(self._registry.get, pair))
        start = self._starts.start(order.tenant, is_alone=self._shares.is_alone(order.tenant, use))
        return Reservation(placement, workers, request, order.tenant, start)
