"""Moves answers from one worker to another while they are decoded, without computing anything again.

1. Room is reserved at a target, before the source is touched: an answer leaves its worker only for another one. The target
   connects to the source, and compiles the answer's grammar (``router/migration/preparation.py``).
2. The source is ordered to hand the answer off. It ends its leg with ``handed_over``, behind the last token of it, and lends
   the KV of all tokens but the last to the next attempt.
3. In the turn of that entry the next attempt begins: its first leg stands for the lease, its second one is an ordinary
   decode leg at the target, which fetches what its cache lacks. The client's stream is not interrupted.
4. The move is over with the target's first token. A target that fails before that leaves the lease as it is, and room is
   reserved at a second one, which fetches the same KV. A target that sends nothing for a while has failed too, if another
   worker could take the answer: it may be dead, which is detected later. If anything else fails, or the second target too,
   the attempt fails, and a replay follows.

From the order on, cancels to the source name the next attempt, so that they end the lease too. The choices of one prompt
are moved one after another: later ones find the prompt in the target's cache.
"""

import asyncio
import logging
import math
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from contract.errors import ErrorKind, KvbatonError, UnavailableError
from contract.requests import HandOff
from router.admission.reservation import Reservation
from router.attempts.leg_outcome import Failure
from router.attempts.request_run import RequestRun, RequestRuns
from router.migration.migration import Migration, MigrationState
from router.migration.preparation import Preparations
from router.routing.legs import CONTINUATION
from router.routing.policy import never_moved_to
from router.telemetry.metrics import MigrationMetrics
from router.workers.attached_worker import AttachedWorker
from router.workers.registry import Registry
from serving.event_loop import ends_within
from wire.legs import hand_off_to_proto

logger = logging.getLogger(__name__)

MIN_AT_ONCE = 2
SHARE_AT_ONCE = 0.05
"""Answers that leave one worker at a time, however long they are."""
TOKENS_AT_ONCE = 16_384
"""Tokens of context that leave one worker at a time, beyond these few. A move takes a few steps of both workers, so
many short ones take no longer together than one; but the KV of long ones crosses one after the other, and clients wait.
"""
_MIN_TOKENS = 2
"""Tokens that an answer must have, so that its prompt is computed, and that must be left of it, so that a move helps."""
_HAND_OFF_SECONDS = 2.0
"""The time within which a worker must begin to hand off; it refuses later."""
_SECOND_TARGET_SECONDS = 2.0
"""The time for which a second target may have no room. It is shorter than any lease, and the client waits."""
_SILENT_SECONDS = 1.0
"""The time for which a target may send nothing, no token of another answer either, before a second one is tried."""
_UNCERTAIN_SECONDS = 1.0
"""The time for which an entry is awaited after a call of which it is unknown whether the worker accepted it."""
_LONG_PAUSE_SECONDS = 0.25
"""A move is logged if its client has waited longer."""
_UNCERTAIN = (ErrorKind.WORKER_LOST, ErrorKind.DEADLINE)


class Migrator:
    """Moves answers between workers."""

    def __init__(
        self,
        registry: Registry,
        runs: RequestRuns,
        metrics: MigrationMetrics,
        tokens_at_once: int = TOKENS_AT_ONCE,
    ) -> None:
        self._registry = registry
        self._runs = runs
        self._metrics = metrics
        self._tokens_at_once = tokens_at_once
        self._preparations = Preparations()

    def can_move(self, run: RequestRun, source: AttachedWorker) -> bool:
        """Return True if the answer is decoded on this worker, can be lent, and has enough tokens left."""
        attempt = run.current.attempt
        return (
            attempt is not None
            and attempt.decodes_on(source)
            and run.current.migration is None
            and bool(source.registration.control_address)
            and len(run.known_tokens) >= _MIN_TOKENS
            and _num_left(run) >= _MIN_TOKENS
        )

    def has_target(self, source: AttachedWorker) -> bool:
        """Return True if another worker may take answers of this one, whether it has room now or not."""
        return self._has_target_but(self._excluded(source))

    def _has_target_but(self, excluded: frozenset[str]) -> bool:
        return any(
            worker.role in CONTINUATION.end_roles and worker.has_credit and worker.name not in excluded
            for worker in self._registry.workers
        )

    async def move(self, run: RequestRun, source: AttachedWorker) -> MigrationState:
        """Move one answer away from a worker, and wait until it continues elsewhere or the move has failed.

        An answer that cannot be moved stays as it is. Cancel the task to give the move up.
        """
        with source.capacity.former.moving():
            return await _count_end(self._metrics, source, self._move(run, source))

    async def move_all(self, source: AttachedWorker, runs: Iterable[RequestRun]) -> Counter[MigrationState]:
        """Move all answers of ``runs`` that can be moved away from a worker; return how many moves had which result.

        Those with the most tokens left go first, as many at a time as ``TOKENS_AT_ONCE`` allows, and the choices of one
        prompt one after another.
        """
        movable = [run for run in runs if self.can_move(run, source)]
        if not movable:
            return Counter()
        min_at_once = max(MIN_AT_ONCE, math.ceil(SHARE_AT_ONCE * len(movable)))
        work = _Work(sorted(movable, key=_num_left, reverse=True), min_at_once, self._tokens_at_once)
        # Between two of these moves the worker is still one that answers leave.
        with source.capacity.former.moving():
            async with asyncio.TaskGroup() as group:

                async def move_next(run: RequestRun) -> None:
                    work.on_end(run, await _count_end(self._metrics, source, self._move(run, source)))
                    begin()

                def begin() -> None:
                    while run := work.pop():
                        group.create_task(move_next(run))

                begin()
        return work.results

    async def _move(self, run: RequestRun, source: AttachedWorker) -> MigrationState:
        if not self.can_move(run, source):
            return MigrationState.ENDED
        if not self.has_target(source):
            return MigrationState.NO_TARGET
        try:
            with await self._reserve(run, self._excluded(source)) as reservation:
                is_prepared = await self._preparations.prepare(run, source, *reservation.workers)
                # The answer has gone on meanwhile: it may have ended, and its worker may be lost.
                if not (is_prepared and self.can_move(run, source)) or _is_refused(
                    reservation, self._excluded(source)
                ):
                    return MigrationState.ENDED
                return await self._hand_off(run, source, reservation)
        except UnavailableError:
            return MigrationState.NO_TARGET

    async def _hand_off(
        self, run: RequestRun, source: AttachedWorker, reservation: Reservation
    ) -> MigrationState:
        """Order the source to hand the answer off, whose room at the target is reserved."""
        attempt = run.current.attempt
        assert attempt is not None, "the run can be moved"
        (request_id, number, choice) = attempt.task.key
        order = HandOff(
            request_id=request_id,
            attempt=number,
            choice=choice,
            transfer_id=f"{request_id}.{number}.{secrets.token_hex(4)}",
            # Taken before the order is sent: from then on a cancel must name the attempt that will own the lease.
            next_attempt=run.current.next_number(),
        )
        migration = Migration(run, attempt, reservation, order)
        try:
            try:
                await _order(migration, source, partial(self._until_stopped, migration, source))
            except KvbatonError as error:
                logger.info("%s stays on worker %s: %s", request_id, source.name, error.message)
                migration.on_refused(error)
                return migration.state
            if migration.failed:
                await self._try_second(migration, migration.failed, run, source)
        finally:
            migration.end()
        self._metrics.note(migration.record)
        if (migration.record.pause_seconds or 0.0) > _LONG_PAUSE_SECONDS:
            logger.info("%s", migration.record)
        return migration.state

    async def _until_stopped(self, migration: Migration, source: AttachedWorker) -> None:
        """Wait until the move is over. A silent target fails, if another worker could take the answer."""
        while not migration.stopped.is_set():
            before = migration.progress
            with suppress(TimeoutError):
                async with asyncio.timeout(_SILENT_SECONDS):
                    await migration.stopped.wait()
            if (
                migration.stopped.is_set()
                or before is None
                or migration.progress != before
                or source.gone.is_set()
            ):
                continue
            if self._has_target_but(self._excluded(source) | {migration.record.targets[-1]}):
                migration.target_is_silent()

    async def _try_second(
        self, migration: Migration, failed: Failure, run: RequestRun, source: AttachedWorker
    ) -> None:
        """Move to another target than the one that has failed, while the source lends the KV; wait for the end of it."""
        logger.info("another worker is to take %s: %s", migration.order.request_id, failed.error.message)
        excluded = self._excluded(source) | {failed.failed_worker.name}
        if self._has_target_but(excluded):
            begin = self._continue_elsewhere(migration, run, source, excluded)
            await ends_within(begin, _SECOND_TARGET_SECONDS, migration.over)
        migration.give_up()
        await migration.over.wait()

    async def _continue_elsewhere(
        self, migration: Migration, run: RequestRun, source: AttachedWorker, excluded: frozenset[str]
    ) -> None:
        """Continue at another worker as soon as one has room; if none can take the answer, return."""
        with suppress(UnavailableError), await self._reserve(run, excluded) as reservation:
            if migration.failed and not _is_refused(reservation, self._excluded(source)):
                migration.continue_at(reservation)

    async def _reserve(self, run: RequestRun, excluded: frozenset[str]) -> Reservation:
        """Wait for room at a worker that is not excluded, ahead of requests that were not begun yet."""
        request, order = run.move_request(excluded)
        return await self._runs.queue.reserve(request, order)

    def _excluded(self, source: AttachedWorker) -> frozenset[str]:
        """Return the ids of the workers to which nothing is moved from ``source``."""
        blocked = self._runs.unreachable.blocked(self._registry.workers)
        sources = (worker.name for worker in self._registry.workers if worker.capacity.former.num_moves)
        return never_moved_to(self._registry.views, source.name, sources, frozenset(blocked))


def _is_refused(reservation: Reservation, excluded: frozenset[str]) -> bool:
    """Return True if the target is lost, or is excluded by now: it may have changed while the move waited for room."""
    return any(worker.gone.is_set() or worker.name in excluded for worker in reservation.workers)


async def _count_end(
    metrics: MigrationMetrics, source: AttachedWorker, moving: Awaitable[MigrationState]
) -> MigrationState:
    """Wait for the end of a move away from a worker, and count it."""
    reason = "drain" if source.capacity.credit.is_draining else "flip"
    result = await moving
    metrics.on_end(result.value, reason)
    return result


async def _order(
    migration: Migration, source: AttachedWorker, until_stopped: Callable[[], Awaitable[None]]
) -> None:
    """Order the source to hand off, and wait until the move is over, however long the call takes.

    Raises the error with which the source has refused: then it lends nothing.
    """
    call = asyncio.create_task(source.calls.hand_off(hand_off_to_proto(migration.order, _HAND_OFF_SECONDS)))
    stopped = asyncio.create_task(migration.stopped.wait())
    try:
        await asyncio.wait({call, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if call.done() and (error := call.exception()) and not migration.is_handed_off:
            if not (isinstance(error, KvbatonError) and error.kind in _UNCERTAIN):
                raise error
            await asyncio.wait({stopped}, timeout=_UNCERTAIN_SECONDS)
            if not migration.is_handed_off:
                return
        await until_stopped()
    finally:
        call.cancel()
        stopped.cancel()


@dataclass
class _Work:
    """The runs that wait for their move, and those that are being moved with the tokens of their contexts."""

    waiting: list[RequestRun]
    min_at_once: int
    tokens_at_once: int
    moving: dict[RequestRun, int] = field(default_factory=dict)
    results: Counter[MigrationState] = field(default_factory=Counter)

    def pop(self) -> RequestRun | None:
        """Return the next run that may be moved now; None if there is none.

        No other choice of its request is being moved, and it is one of few, or its context is small enough.
        """
        requests = {run.request.request_id for run in self.moving}
        num_free = self.tokens_at_once - sum(self.moving.values())
        for run in self.waiting:
            num_tokens = len(run.request.prompt_token_ids) + len(run.known_tokens)
            may_move = len(self.moving) < self.min_at_once or num_tokens <= num_free
            if may_move and run.request.request_id not in requests:
                self.waiting.remove(run)
                self.moving[run] = num_tokens
                return run
        return None

    def on_end(self, run: RequestRun, result: MigrationState) -> None:
        """Record that a move is over."""
        del self.moving[run]
        self.results[result] += 1


def _num_left(run: RequestRun) -> int:
    return run.request.sampling.max_tokens - len(run.known_tokens)
