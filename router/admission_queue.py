"""Requests that wait for workers with room: here, not in an engine's queue (late binding).

So a request is bound to the workers that are best when its turn comes, not when it came; and a worker's death costs
nobody a place in a queue.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from contract.errors import UnavailableError
from router.attempt import Attempt
from router.change_signal import ChangeSignal
from router.fair_queue import FairQueue, QueueEntry, QueueOrder, StartRule
from router.legs import Placement
from router.policy import (
    Need,
    Pairs,
    PlacementRequest,
    WorkerView,
    awaited,
    candidates,
    missing_role,
    place,
    why_too_long,
)
from router.registry import Registry
from router.role_timeouts import RoleTimeouts
from router.running_shares import RunningShares, Use
from router.start_limiter import StartLimiter
from router.unreachable_pairs import UnreachablePairs


@dataclass(frozen=True)
class _Lane:
    """Requests of one lane need the same and are able to run on the same workers."""

    need: Need
    workers: frozenset[str]


@dataclass(eq=False)
class _Waiter:
    """One request that waits, for as long as is_queued. timer: runs while the request fits no attached worker."""

    wish: PlacementRequest
    begin: Callable[[Placement], Attempt]
    attempt: asyncio.Future[Attempt]
    timer: asyncio.TimerHandle | None = None
    is_queued: bool = True

    def stop_timer(self) -> None:
        if self.timer:
            self.timer.cancel()
            self.timer = None


class AdmissionQueue:
    """Owns the requests that are bound to no worker. ``FairQueue`` decides who is next.

    Nobody passes the head of a lane. Heads of other lanes may be bound while it waits, but not to the workers that it waits
    for: so an embedding does not wait for a decode worker, and a request for a small worker not for a large one. A role or a
    size that no worker has is waited for ``patience_seconds``: one may be starting again. A client that holds its share of
    what runs (``shares``) is passed by the others.
    """

    def __init__(
        self,
        registry: Registry,
        changes: ChangeSignal,
        severed: UnreachablePairs,
        shares: RunningShares,
        patience_seconds: float,
    ) -> None:
        self._registry = registry
        self._severed = severed
        self._shares = shares
        self._patience_seconds = patience_seconds
        self._patience = RoleTimeouts(patience_seconds, self._serve)
        self._queue: FairQueue[_Lane, _Waiter] = FairQueue()
        self._able: list[tuple[object, ...]] = []
        self._starts = StartLimiter(self._serve_soon)
        self._turn = 0
        self._is_due = False
        changes.add_listener(self._serve_soon)

    def __len__(self) -> int:
        return len(self._queue)

    async def bind(
        self, wish: PlacementRequest, claim: QueueOrder, begin: Callable[[Placement], Attempt]
    ) -> Attempt:
        """Wait for workers with room, then ``begin`` an attempt there, at once. The caller closes it.

        Raises UnavailableError when a role that is needed, or a worker that is large enough, has been missing for
        ``patience_seconds``; at once if workers have refused the request for its size and no other is attached.
        """
        waiter = _Waiter(wish, begin, asyncio.get_running_loop().create_future())
        self._shares.note(claim.tenant)
        workers = self._registry.snapshot()
        ticket = self._queue.add(self._lane_of(waiter, workers), claim, waiter)
        self._serve_if_it_matters(ticket)
        try:
            return await waiter.attempt
        except asyncio.CancelledError:
            attempt = waiter.attempt
            if attempt.done() and not attempt.cancelled() and attempt.exception() is None:
                attempt.result().close()
            raise
        finally:
            waiter.stop_timer()
            if waiter.is_queued:
                is_head = self._is_head(ticket)
                self._discard(ticket)
                if is_head:
                    self._serve()

    def close(self) -> None:
        """Stop all timers: the router stops."""
        self._patience.close()
        for ticket in self._queue:
            ticket.item.stop_timer()

    def _serve_soon(self) -> None:
        """Serve once in the next round of the event loop, however many changes there are until then."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._serve)

    def _serve_if_it_matters(self, ticket: QueueEntry[_Lane, _Waiter]) -> None:
        """Do nothing for one that comes behind a head that waits for room: nothing changes for anybody."""
        if self._is_head(ticket) or self._patience.missing(ticket.item.wish.need):
            self._serve()

    def _is_head(self, ticket: QueueEntry[_Lane, _Waiter]) -> bool:
        return self._queue.head(ticket.lane, self._may_go(self._registry.decoding())) is ticket

    def _may_go(self, uses: Sequence[Use]) -> StartRule[_Lane, _Waiter]:
        """Return the rule by which a client that holds its share, or starts enough already, is passed.

        Embeddings do not decode.
        """

        def may_start(ticket: QueueEntry[_Lane, _Waiter]) -> bool:
            wish = ticket.item.wish
            if not self._starts.may_start(ticket.claim.tenant):
                return False
            num_tokens = wish.num_prompt_tokens + wish.num_answer_tokens
            return wish.is_embedding or self._shares.may_begin(
                ticket.claim.tenant, wish.num_choices, num_tokens, uses
            )

        return may_start

    def _serve(self) -> None:
        """Bind the heads of the lanes for as long as there is room."""
        self._is_due = False
        workers = self._registry.snapshot()
        self._patience.look(workers)
        self._sort_into_lanes(workers)
        severed = self._severed.among(self._registry.workers) if self._queue else frozenset()
        while self._bind_one(workers, severed):
            workers = self._registry.snapshot()
        self._end_hopeless()

    def _bind_one(self, workers: Sequence[WorkerView], severed: Pairs) -> bool:
        """Bind the first head that has room. Workers that an earlier head waits for are taken as full."""
        uses = self._registry.decoding()
        self._starts.num_workers = len(uses)
        for ticket in self._queue.heads(self._may_go(uses)):
            lane = ticket.lane
            tenant = ticket.claim.tenant
            if ticket.item.attempt.done():
                self._discard(ticket)
                return True
            if not lane.workers or self._patience.missing(lane.need):
                continue
            wish = ticket.item.wish
            if placement := place(workers, wish, self._turn, severed):
                self._queue.take(ticket)
                ticket.item.is_queued = False
                self._turn += 1
                attempt = ticket.item.begin(placement)
                self._starts.add(tenant, attempt.calls, is_alone=self._shares.is_alone(tenant, uses))
                ticket.item.attempt.set_result(attempt)
                return True
            kept = awaited(workers, wish)
            workers = [_as_full(view) if view.worker_id in kept else view for view in workers]
        return False

    def _discard(self, ticket: QueueEntry[_Lane, _Waiter]) -> None:
        self._queue.discard(ticket)
        ticket.item.is_queued = False

    def _sort_into_lanes(self, workers: Sequence[WorkerView]) -> None:
        """Look again where each request is able to run, when that may have changed."""
        able: list[tuple[object, ...]] = [
            (view.worker_id, view.role, view.max_length, view.pool_tokens, bool(view.max_requests))
            for view in workers
        ]
        if able == self._able:
            return
        self._able = able
        for ticket in list(self._queue):
            lane = self._lane_of(ticket.item, workers)
            if lane != ticket.lane:
                self._queue.move(ticket, lane)

    def _lane_of(self, waiter: _Waiter, workers: Sequence[WorkerView]) -> _Lane:
        """Return where a request waits; where it fits no worker, wait for one for a while."""
        wish = waiter.wish
        found = candidates(workers, wish)
        if found or missing_role(workers, wish.need):  # for a role RoleTimeouts waits, whatever the size
            waiter.stop_timer()
        elif waiter.timer is None and not waiter.attempt.done():
            seconds = 0.0 if wish.too_small else self._patience_seconds
            loop = asyncio.get_running_loop()
            waiter.timer = loop.call_later(seconds, self._give_up, waiter)
        return _Lane(wish.need, found)

    def _give_up(self, waiter: _Waiter) -> None:
        """End a request that has fitted no worker for too long, or let a smaller worker cut its answer."""
        waiter.timer = None
        workers = self._registry.snapshot()
        if waiter.wish.may_be_cut and waiter.wish.max_length:
            waiter.wish = replace(waiter.wish, max_length=0)
            self._able = []
            self._serve()
        elif not waiter.attempt.done():
            text = f"no worker is ready: {why_too_long(workers, waiter.wish)}; shorten it, or try again later"
            waiter.attempt.set_exception(UnavailableError(text))

    def _end_hopeless(self) -> None:
        is_over = self._patience.is_over
        if not any(is_over(need) for need in Need):
            return
        for ticket in [ticket for ticket in self._queue if is_over(ticket.item.wish.need)]:
            self._discard(ticket)
            waiter = ticket.item
            if not waiter.attempt.done():
                missing = self._patience.missing(waiter.wish.need)
                text = f"no worker is ready: {missing}, for {self._patience_seconds:g} s; try again later"
                waiter.attempt.set_exception(UnavailableError(text))


def _as_full(view: WorkerView) -> WorkerView:
    return replace(view, num_requests=max(view.num_requests, view.max_requests, 1))
