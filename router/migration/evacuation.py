"""Takes legs to other workers, away from draining workers, so that no request waits for, or fails with, a worker that ends.

1. A worker drains: its credit is nothing, so no leg is bound to it any more. Legs on which an answer is to end, and which
   have emitted nothing there, begin again on another worker if there is one.
2. When every router has answered that credit, answers that it decodes are moved to other workers (``moving.py``).
   What cannot be moved continues, and is tried again.
3. At the worker's deadline each leg that is left begins again on another worker, behind the tokens that were delivered.
4. The worker reports that it is empty, or is gone.

From a worker that has become a prefill worker only answers are moved, without a deadline.

A leg that begins again is a replay (law 5) without a failure: it does not count as one of those that a request survives.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from contract.identity import WORKER_ROLES, Role
from contract.membership import RoleOrder
from router.attempts.leg_outcome import WorkerDrainedError
from router.attempts.request_run import RequestRuns
from router.concurrency import ChangeSignal, TaskSet
from router.migration.migration import MigrationState
from router.migration.migrator import Migrator
from router.migration.standing_orders import StandingOrders
from router.routing.policy import decodes_no_more
from router.telemetry.metrics import DrainMetrics
from router.workers.attached_worker import AttachedWorker
from router.workers.registry import Registry

logger = logging.getLogger(__name__)

_AGAIN_SECONDS = 0.1
"""The time after which answers that could not be moved are tried again: nothing reports when they can be."""


@dataclass
class _Drain:
    """A drain that is on. timer: for its deadline. were_moved: legs were left at the deadline.

    is_counted: its first result was counted. A worker that was empty may lend again for a moment.
    """

    began: float
    timer: asyncio.TimerHandle | None = None
    were_moved: bool = False
    is_empty: bool = False
    is_counted: bool = False

    def stop_timer(self) -> None:
        if self.timer:
            self.timer.cancel()
            self.timer = None


class Evacuation:
    """Owns the drains of attached workers that are on. clock: seconds, for metrics. standing: what outlives a process.

    ``changes`` is notified when a worker drains, or is empty.
    """

    def __init__(
        self,
        registry: Registry,
        runs: RequestRuns,
        migrator: Migrator,
        tasks: TaskSet,
        changes: ChangeSignal,
        metrics: DrainMetrics,
        clock: Callable[[], float] = time.monotonic,
        standing: StandingOrders | None = None,
    ) -> None:
        self._standing = standing or StandingOrders()
        self._registry = registry
        self._runs = runs
        self._migrator = migrator
        self._tasks = tasks
        self._changes = changes
        self._metrics = metrics
        self._clock = clock
        self._drains: dict[AttachedWorker, _Drain] = {}
        self._emptied: set[AttachedWorker] = set()

    def on_credit_changed(self, worker: AttachedWorker) -> None:
        """Process a worker's new credit: whether it drains, until when, and whether it is empty."""
        credit = worker.capacity.credit
        ordered = worker.capacity.ordered
        if credit.max_requests and ordered and ordered.role == worker.role:
            worker.capacity.ordered = None
            self._changes.notify()
        if not credit.is_draining:
            self._end(worker, "undone")
            self._standing.restore(worker, self._registry.missing_with)
        elif worker not in self._drains:
            self._begin(worker)
        if self._has_answers_to_move(worker) and worker not in self._emptied:
            self._emptied.add(worker)
            self._tasks.spawn(self._move_answers(worker), f"move the answers of {worker.name}")
        if (drain := self._drains.get(worker)) is None:
            return
        drain.stop_timer()
        self._changes.notify()
        if credit.is_empty:
            self._record(drain, "moved" if drain.were_moved else "empty")
        drain.is_empty = credit.is_empty
        if not credit.is_empty and not drain.were_moved:
            drain.timer = asyncio.get_running_loop().call_later(
                credit.drain_seconds, self.move_legs, worker, "its time to drain is over"
            )

    def role_taken(self, worker: AttachedWorker, taken: RoleOrder) -> None:
        """Process the role that a worker has taken, or that it had already when it attached."""
        if taken.role not in WORKER_ROLES:
            logger.warning("worker %s reported the role %r; ignored", worker.name, taken.role)
            return
        ordered = worker.capacity.ordered
        if ordered and taken.epoch >= ordered.epoch and taken.role != ordered.role:
            worker.capacity.ordered = (
                None  # a router needs the former role, or a later order has come from elsewhere
            )
            self._changes.notify()
        if taken.role != worker.role:
            self._registry.set_role(worker, Role(taken.role))
            self._metrics.on_flip(taken.role)

    def on_worker_gone(self, worker: AttachedWorker) -> None:
        """End the drain of a worker that is detached, if one is on."""
        self._standing.on_detach(worker)
        self._end(worker, "lost")

    def move_legs(self, worker: AttachedWorker, why: str) -> None:
        """Begin all legs that are bound to a worker again on other workers, at once."""
        text = f"worker {worker.name} has given the request up: {why}"
        num_moved = sum(run.leave(worker, WorkerDrainedError(text)) for run in list(self._runs.open_runs))
        if num_moved:
            logger.info("%d answers leave worker %s: %s", num_moved, worker.name, why)
        if drain := self._drains.get(worker):
            drain.were_moved = True

    def _begin(self, worker: AttachedWorker) -> None:
        credit = worker.capacity.credit
        worker.capacity.ordered = None  # a drain ends a change that was not made yet
        logger.info(
            "worker %s drains: its %d legs have %.1f s",
            worker.name,
            worker.capacity.num_requests,
            credit.drain_seconds,
        )
        self._drains[worker] = _Drain(self._clock())
        # only if another worker has the role and accepts legs: without one, legs that leave would wait
        if any(
            other is not worker and other.role is worker.role and other.has_credit
            for other in self._registry.workers
        ):
            text = f"worker {worker.name} drains, and has not begun to decode the request"
            for run in list(self._runs.open_runs):
                run.leave(worker, WorkerDrainedError(text), only_unstarted=True)

    def _has_answers_to_move(self, worker: AttachedWorker) -> bool:
        """Return True if answers on a worker are to continue elsewhere, as far as is known."""
        if worker.gone.is_set() or not decodes_no_more(worker.role, worker.capacity.credit):
            return False
        if drain := self._drains.get(worker):
            return not (drain.were_moved or drain.is_empty)
        return worker.capacity.former.num_legs > 0

    async def _move_answers(self, worker: AttachedWorker) -> None:
        """Move what the worker decodes to other workers, until nothing is left or its legs are taken away."""
        try:
            while self._has_answers_to_move(worker):
                moved = await self._migrator.move_all(worker, list(self._runs.open_runs))
                if num_moved := moved[MigrationState.MOVED]:
                    logger.info("%d answers were moved away from worker %s", num_moved, worker.name)
                await asyncio.sleep(_AGAIN_SECONDS)
        finally:
            self._emptied.discard(worker)

    def _end(self, worker: AttachedWorker, result: str) -> None:
        drain = self._drains.pop(worker, None)
        if drain:
            drain.stop_timer()
            self._record(drain, result)

    def _record(self, drain: _Drain, result: str) -> None:
        if not drain.is_counted:
            drain.is_counted = True
            self._metrics.on_end(result, self._clock() - drain.began)
