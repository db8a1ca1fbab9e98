"""Requests that wait for workers with room: here, and not in an engine's queue (late binding).

Therefore a request is bound to the workers that are best when it is admitted, and not when it arrived, and no request loses
its place in a queue when a worker dies.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from router.change_signal import ChangeSignal
from router.fair_queue import QueueOrder, StartRule
from router.lanes import Entry, Lane, Lanes, WaitingRequest
from router.legs import CONTINUATION, Placement
from router.policy import Pairs, PlacementRequest, awaited, never_bound, place
from router.registry import Registry
from router.reservation import Reservation
from router.role_timeouts import RoleTimeouts
from router.running_shares import RunningShares, TotalCredit
from router.start_limiter import StartLimiter
from router.unreachable_pairs import UnreachablePairs


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

    @asynccontextmanager
    async def reserve(self, request: PlacementRequest, order: QueueOrder) -> AsyncIterator[Reservation]:
        """Wait for workers with room, and hold their credit until the block ends or legs have taken it over.

        Raises UnavailableError when a role that is needed, or a worker that is large enough, has been missing for
        ``wait_seconds``; at once if workers have rejected the request because of its size and no other one is attached.
        """
        waiting = WaitingRequest(request, asyncio.get_running_loop().create_future())
        self._shares.note(order.tenant)
        entry = self._lanes.add(waiting, order)
        try:
            if self._may_change_something(entry):
                self._admit()
            yield await waiting.reservation
        finally:
            self._leave(entry)

    def close(self) -> None:
        """Stop all timers, since the router stops."""
        self._role_timeouts.close()
        self._lanes.close()

    def _leave(self, entry: Entry) -> None:
        """Release what a request has reserved, or remove it if it still waits."""
        waiting = entry.item
        waiting.stop_timer()
        if waiting.is_queued:
            was_head = self._lanes.is_head(entry, self._start_rule(self._registry.decoding()))
            self._lanes.discard(entry)
            if was_head:
                self._admit()
        reserved = waiting.reservation
        if reserved.done() and not reserved.cancelled() and reserved.exception() is None:
            reserved.result().release()

    def _may_change_something(self, entry: Entry) -> bool:
        """Return False for a request behind one that waits for room: its arrival admits nothing."""
        is_head = self._lanes.is_head(entry, self._start_rule(self._registry.decoding()))
        return is_head or self._role_timeouts.missing(entry.item.request.least_plan) is not None

    def _start_rule(self, use: TotalCredit) -> StartRule[Lane, WaitingRequest]:
        """Return the rule by which a client that holds its share, or starts enough already, is overtaken."""

        def may_start(entry: Entry) -> bool:
            tenant = entry.order.tenant
            request = entry.item.request
            if not self._starts.may_start(tenant):
                return False
            # Shares are of the workers that decode, and an answer that is moved holds its share already.
            if not request.plan.emits_tokens or request.plan is CONTINUATION:
                return True
            return self._shares.may_begin(tenant, request.num_choices, request.num_tokens, use)

        return may_start

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
        unreachable = never_bound(self._registry.views)
        if len(self._unreachable):
            unreachable |= self._unreachable.blocked(self._registry.workers)
        while len(self) and self._admit_one(unreachable):
            pass
        if self._role_timeouts.any_expired:
            self._lanes.fail_expired(self._role_timeouts)

    def _admit_one(self, unreachable: Pairs) -> bool:
        """Admit the first request that has room. Workers that an earlier one waits for are taken as full."""
        workers = self._registry.views
        use = self._registry.decoding()
        self._starts.num_workers = use.num_workers
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
            if placement := place(workers, request, self._turn, unreachable, taken):
                self._turn += 1
                self._lanes.admit(entry, self._reservation(placement, entry, use))
                return True
            before = request
        return False

    def _reservation(self, placement: Placement, entry: Entry, use: TotalCredit) -> Reservation:
        """Hold credit for a placement that was just decided on, and count it as a start and as a probe of its pair."""
        tenant = entry.order.tenant
        workers = [self._registry.get(leg.worker) for leg in placement.legs]
        if pair := placement.hand_over:
            self._unreachable.record_probe(*map(self._registry.get, pair))
        start = self._starts.start(tenant, is_alone=self._shares.is_alone(tenant, use))
        return Reservation(placement, workers, entry.item.request, tenant, start)
