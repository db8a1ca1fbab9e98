"""The failures of one answer so far, and what follows from them for its next attempt: the ladder of law 5.

1. Other workers are tried; the failed workers are avoided.
2. A pair that cannot hand KV over (``unreachable_pairs.py``) is left for another pair; without one, the decode worker
   computes the prompt.
3. After two failed hand-overs in a row a decode worker computes the prompt.
4. A worker that rejected the request because of its length is not tried again; a larger one is.
5. After ``max_replays`` failures in a row, or four times as many in all, the client receives the last error. A counter that
   each token resets does not bound them: a request may fail after every token.
6. When one more death would be the last, the request is a suspect: it runs where no other suspect does
   (``suspects.py``), so that a bystander does not end for what another request has done.
7. After ``max_worker_deaths`` workers were lost with it, the client receives an error: the request may be the cause.

A leg that a draining worker gives up is no failure: other workers continue, and none is avoided for it.
"""

import logging
from dataclasses import dataclass

from contract.errors import (
    SIZE_PARAM,
    TRANSFER_KINDS,
    ErrorKind,
    KvbatonError,
    UnavailableError,
    WorkerLostError,
)
from router.admission.unreachable_pairs import UnreachablePairs
from router.attempts.attempt import Attempt
from router.attempts.leg_outcome import Failure, WorkerDrainedError, for_client
from router.workers.attached_worker import AttachedWorker

logger = logging.getLogger(__name__)

CURABLE = frozenset(
    {
        ErrorKind.WORKER_LOST,
        ErrorKind.UNAVAILABLE,
        ErrorKind.OVERLOADED,
        ErrorKind.DEADLINE,
        *TRANSFER_KINDS,
    }
)
"""Kinds of errors of a worker that another worker may not have. The request's own deadline is checked separately."""
MAX_TRANSFER_FAILURES = 2
_TOTAL_FACTOR = 4
"""Failures of one answer in all that are borne, in those in a row."""
_NONE: frozenset[str] = frozenset()
_PAUSES_SECONDS = (0.0, 0.0, 0.05, 0.2, 0.8, 2.0)
"""Pauses before an attempt, by the number of failures in a row. The first replay begins at once."""


class Failures:
    """Owns the history of one answer's failures."""

    def __init__(self, unreachable: UnreachablePairs, max_replays: int, max_deaths: int) -> None:
        self._unreachable = unreachable
        self._num_failures = 0
        self._num_transfer_failures = 0
        self._totals = _Totals(max_replays, max_deaths)
        self._failed_workers: set[AttachedWorker] = set()
        self._names: set[str] = set()
        self._too_small: set[AttachedWorker] = set()
        self.prefer: str | None = None
        self.last: KvbatonError | None = None
        self.proven: Attempt | None = None
        """The attempt whose progress was recorded last."""

    @property
    def avoid(self) -> frozenset[str]:
        """Ids of the workers that may be at fault and are still attached."""
        if not self._failed_workers:
            return _NONE
        return frozenset(worker.name for worker in self._failed_workers if not worker.gone.is_set())

    @property
    def too_small(self) -> frozenset[str]:
        """Ids of the workers that rejected the request because it is too long for them."""
        if not self._too_small:
            return _NONE
        return frozenset(worker.name for worker in self._too_small if not worker.gone.is_set())

    @property
    def is_local(self) -> bool:
        """True when no further hand-over is tried."""
        return self._num_transfer_failures >= MAX_TRANSFER_FAILURES or self._totals.is_local

    @property
    def is_suspect(self) -> bool:
        """True if workers were lost with the request, and the next one would be the last."""
        return 0 < self._totals.num_deaths == self._totals.max_deaths - 1

    @property
    def pause_seconds(self) -> float:
        """Seconds to wait before the next attempt, so that attempts that fail at once are not used up at once."""
        return _PAUSES_SECONDS[min(self._num_failures, len(_PAUSES_SECONDS) - 1)]

    def progress(self, attempt: Attempt) -> None:
        """Record that the first token of the last leg has arrived, which ends a row of failures."""
        self.proven = attempt
        self._num_failures = 0
        self._num_transfer_failures = 0
        if hand_over := attempt.legs.hand_over:
            self._unreachable.record_success(*hand_over)

    def note(self, attempt: Attempt, error: KvbatonError) -> None:
        """Record why an attempt failed. Raises the error if no further attempt could help, or too many have failed."""
        failure = attempt.failure
        if failure is None:  # no worker has failed: the deadline has passed, or the client reads too slowly
            raise error
        self.last = error
        self._names |= {leg.worker.name for leg in attempt.legs}
        hand_over = attempt.legs.hand_over
        # Its prefix cache has the prompt: where that worker lives, the next attempt computes almost nothing there.
        self.prefer = hand_over[0].name if hand_over else None
        if isinstance(error, WorkerDrainedError):
            return
        if (
            error.kind is ErrorKind.INVALID_REQUEST and error.param == SIZE_PARAM
        ):  # a larger worker may take it
            self._too_small.add(failure.failed_worker)
            return
        self._note_pair(attempt, error)
        if not self._is_known_death(failure):
            self._num_failures += 1
            self._num_transfer_failures += error.kind in TRANSFER_KINDS
            self._totals.count(error)
        ended = self._totals.ended(error)
        if ended or error.kind not in CURABLE or self._num_failures > self._totals.max_replays:
            names = ", ".join(leg.worker.name for leg in attempt.legs)
            logger.warning("%s fails on %s: %s", attempt.task.request.request_id, names, error.kind.value)
            raise for_client(ended or error, self._names)
        self._failed_workers |= failure.failed_workers

    def note_target(self, attempt: Attempt, failure: Failure) -> None:
        """Record that a worker has failed to which the answer was to move. The attempt continues at another one."""
        self._note_pair(attempt, failure.error)
        if not isinstance(failure.error, WorkerDrainedError):
            self._totals.count(failure.error)
            self._failed_workers.add(failure.failed_worker)

    def without_workers(self, error: UnavailableError) -> KvbatonError:
        """Return the client's error after a failure if no worker is left for another attempt."""
        last = self.last
        if last is None:
            return error
        if last.kind is ErrorKind.INVALID_REQUEST:  # every worker that is attached has rejected its size
            return for_client(last, self._names)
        return for_client(type(last)(f"{last.message}; then {error.message}", param=last.param), self._names)

    def _note_pair(self, attempt: Attempt, error: KvbatonError) -> None:
        """Record that the workers of the attempt's hand-over cannot hand KV over, if that is the error."""
        hand_over = attempt.legs.hand_over
        if error.kind in TRANSFER_KINDS and hand_over:
            self._unreachable.record_failure(*hand_over, error)

    def _is_known_death(self, failure: Failure) -> bool:
        """Return True if all failed workers are gone and have failed before: one death must cost one attempt only.

        A peer may report the death before the worker's own stream breaks, so that a replay is bound to the worker again. A
        worker that is gone takes no further attempt, so this excuses each death at most once.
        """
        known = [worker.gone.is_set() and worker in self._failed_workers for worker in failure.failed_workers]
        return bool(known) and all(known)


@dataclass
class _Totals:
    """The failures of one answer in all, however many tokens came between them."""

    max_replays: int
    max_deaths: int
    num_failures: int = 0
    num_transfers: int = 0
    num_deaths: int = 0

    @property
    def is_local(self) -> bool:
        """True when so many hand-overs have failed that no further one is tried."""
        return self.num_transfers >= _TOTAL_FACTOR * MAX_TRANSFER_FAILURES

    def count(self, error: KvbatonError) -> None:
        """Count a failure."""
        self.num_failures += 1
        self.num_transfers += error.kind in TRANSFER_KINDS
        self.num_deaths += error.kind is ErrorKind.WORKER_LOST

    def ended(self, error: KvbatonError) -> KvbatonError | None:
        """Return the error with which the request ends after ``error``; None if another attempt may be made."""
        if self.num_deaths >= self.max_deaths:
            return WorkerLostError(
                f"{self.num_deaths} workers were lost while they computed this request, which may be the cause; "
                f"it is not tried again. The last one: {error.message}"
            )
        return error if self.num_failures > _TOTAL_FACTOR * self.max_replays else None
