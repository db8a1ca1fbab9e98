"""Requests that wait for workers with room: here, and not in an engine's queue (late binding).

Therefore a request is bound to the workers that are best when it is admitted, and not when it arrived, and no request loses
its place in a queue when a worker dies. ``AdmissionQueue`` decides who is next, ``Placements`` where the request runs, and
``Admission`` bounds the number of those that wait, with a share for each client.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Set

from msgspec import structs

from contract.errors import OverloadedError, UnavailableError
from contract.identity import Role
from router.admission.fair_queue import QueueOrder, StartRule
from router.admission.lanes import Entry, Lane, Lanes, RoleTimeouts, WaitingRequest
from router.admission.reservation import Reservation, StartLimiter
from router.admission.unreachable_pairs import UnreachablePairs
from router.concurrency import ChangeSignal
from router.intake.limits import ClientCounts
from router.routing.legs import CONTINUATION
from router.routing.policy import Pairs, PlacementRequest, awaited, never_bound, place
from router.routing.running_shares import RunningShares, TotalCredit
from router.workers.registry import Registry

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
        # others that wait were first, and a request that lacks a role waits in its lane, where its timeout runs
        if not self._lanes:
            self._role_timeouts.update(self._registry.views)
            placements = self._placements
            # a client that may not start now waits in the queue, where others can overtake it
            may_begin = not self._role_timeouts.missing(request.least_plan) and placements.may_start(
                request, order, placements.total_credit()
            )
            if may_begin and (reservation := placements.reserve(request, order, placements.blocked_pairs())):
                self._lanes.charge(order, reservation.num_choices / request.num_choices)
                return reservation
        return await self._wait(request, order, deadline)

    def close(self) -> None:
        """Stop all timers, since the router stops."""
        self._role_timeouts.close()
        self._lanes.close()

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
            # behind an earlier request of its lane it cannot be admitted now, so that its arrival changes nothing
            is_head = self._lanes.is_head(entry, self._placements.start_rule())
            if is_head or self._role_timeouts.missing(request.least_plan):
                self._admit()
            return await waiting.reservation
        # a cancellation too: the client has gone, and must hold neither a place in the queue nor credit
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
            # those behind it may have waited for its turn only, and no change of a worker would wake them
            if was_head:
                self._admit()
        reserved = waiting.reservation
        # it was admitted in the turn of the event loop in which its wait ended otherwise
        if reserved.done() and not reserved.cancelled() and reserved.exception() is None:
            reserved.result().release()

    # every answer that ends makes room, so this is called far more often than a decision is needed
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
        if self._role_timeouts.expired:
            self._lanes.fail_expired(self._role_timeouts)

    def _admit_one(self, unreachable: Pairs) -> bool:
        """Admit the first request that has room. Workers that an earlier one waits for are taken as full."""
        workers = self._registry.views
        taken: frozenset[str] = frozenset()
        before: PlacementRequest | None = None
        for entry in self._lanes.heads(self._placements.start_rule()):
            request = entry.item.request
            # its deadline has passed; without it the lane has another head, so the heads are read again
            if entry.item.reservation.done():
                self._lanes.discard(entry)
                return True
            if not entry.lane.workers or self._role_timeouts.missing(entry.lane.plan):
                continue
            if before:
                # found out only when another lane follows: most of the time there is one lane
                taken |= awaited(workers, before, taken)
            if reservation := self._placements.reserve(request, entry.order, unreachable, taken):
                self._lanes.admit(entry, reservation)
                return True
            before = request
        return False


class Placements:
    """Decides which client may begin a request, chooses the workers, and holds their credit.

    It owns the number of placements, by which equally loaded workers take turns. decisions: their number, by the kinds of
    the first and the last leg.
    """

    def __init__(
        self, registry: Registry, unreachable: UnreachablePairs, shares: RunningShares, starts: StartLimiter
    ) -> None:
        self._registry = registry
        self._unreachable = unreachable
        self._shares = shares
        self._starts = starts
        self._turn = 0
        self.decisions: Counter[tuple[str, str]] = Counter()

    def total_credit(self) -> TotalCredit:
        """Return the credit of the workers that decode, which bounds what each client runs and starts."""
        use = self._registry.decoding()
        self._starts.num_workers = use.num_workers
        return use

    def may_start(self, request: PlacementRequest, order: QueueOrder, use: TotalCredit) -> bool:
        """Return False for a request of a client that holds its share, or starts enough already."""
        if not self._starts.may_start(order.tenant):
            return False
        if self._is_unbounded(request):
            return True
        return self._num_to_begin(request, order, use) > 0

    @staticmethod
    def _is_unbounded(request: PlacementRequest) -> bool:
        """Return True for an embedding, since shares are of workers that decode, and for a moved answer, which has one."""
        return not request.plan.emits_tokens or request.plan is CONTINUATION

    def _num_to_begin(self, request: PlacementRequest, order: QueueOrder, use: TotalCredit) -> int:
        return self._shares.num_to_begin(
            order.tenant, request.num_choices, request.num_prompt_tokens, request.num_answer_tokens, use
        )

    def start_rule(self) -> StartRule[Lane, WaitingRequest]:
        """Return the rule of now by which a client that ``may_start`` nothing is overtaken."""
        use = self.total_credit()
        return lambda entry: self.may_start(entry.item.request, entry.order, use)

    def blocked_pairs(self) -> Pairs:
        """Return the pairs of workers between which nothing is handed over now."""
        unreachable = never_bound(self._registry.views)
        if len(self._unreachable):
            unreachable |= self._unreachable.blocked(self._registry.workers)
        return unreachable

    def reserve(
        self, request: PlacementRequest, order: QueueOrder, unreachable: Pairs, taken: Set[str] = _NONE
    ) -> Reservation | None:
        """Choose workers, hold their credit, and count the request as a start and as a probe of its pair.

        Returns None while no workers have room. The reservation is for as many of the request's choices as its client
        ``may_start`` now. taken: workers that count as full.
        """
        use = self.total_credit()
        if request.num_choices > 1 and not self._is_unbounded(request):
            number = max(1, self._num_to_begin(request, order, use))
            request = structs.replace(request, num_choices=number)
        placement = place(self._registry.views, request, self._turn, unreachable, taken)
        # a client that runs nothing gets its first short request in where all tokens are promised: otherwise the long
        # answers of others would keep it out until they end
        if placement is None and self._shares.may_overdraw(
            order.tenant, request.num_choices, request.num_tokens, use
        ):
            request = structs.replace(request, may_overdraw=True)
            placement = place(self._registry.views, request, self._turn, unreachable, taken)
        if placement is None:
            return None
        # placements count, and not attempts at one: equally loaded workers then alternate
        self._turn += 1
        legs = placement.legs
        self.decisions[legs[0].kind, legs[-1].kind] += 1
        workers = [self._registry.get(leg.worker) for leg in legs]
        # a pair whose pause is over is tried by this one request before others follow
        if pair := placement.hand_over:
            self._unreachable.record_probe(*map(self._registry.get, pair))
        is_alone = self._shares.is_alone(order.tenant, self._registry.held)
        start = self._starts.start(order.tenant, is_alone=is_alone)
        return Reservation(placement, workers, request, order.tenant, start)


class Admission:
    """Owns the slots of the queue, by client. ``max_queue`` is their number.

    waiting: counts the requests that hold a slot.
    """

    def __init__(self, max_queue: int) -> None:
        self._max_queue = max_queue
        self.waiting = ClientCounts()
        self._refusal: str | None = None

    def close(self, reason: str) -> None:
        """Reject every request from now on."""
        self._refusal = reason

    def check(self, tenant: str, num_more: int) -> None:
        """Raise OverloadedError if ``num_more`` requests of a client may not wait, UnavailableError after ``close``."""
        if self._refusal is not None:
            raise UnavailableError(self._refusal)
        # the text names both numbers: a client may be over its share though the queue has room for others
        if not self.waiting.has_room(tenant, self._max_queue, num_more):
            raise OverloadedError(
                f"{self.waiting.total} requests wait for workers ({self.waiting.of(tenant)} of this client), this one makes "
                f"{num_more} more, and max_queue is {self._max_queue}; try again later"
            )
