"""What has gone wrong with one answer so far, and what follows for its next attempt: the ladder of law 5.

1. Other workers are tried, those that were at fault are avoided.
2. A pair that cannot reach each other is left for another pair; with no other, the decode worker computes the prompt.
3. After two failed hand-overs in a row a decode worker computes the prompt.
4. A worker for which the request is too long is not asked again; a larger one is.
5. After ``max_replays`` failures in a row the last error is the client's.
"""

from contract.errors import SIZE_PARAM, ErrorKind, KvbatonError
from router.attempt import Attempt
from router.leg_failure import Failure
from router.registry import AttachedWorker
from router.unreachable_pairs import UnreachablePairs
from router.worker_calls import RouterExhaustedError

CURABLE = frozenset(
    {
        ErrorKind.WORKER_LOST,
        ErrorKind.UNAVAILABLE,
        ErrorKind.OVERLOADED,
        ErrorKind.TRANSFER_FAILED,
        ErrorKind.PEER_UNREACHABLE,
        ErrorKind.INCOMPATIBLE,
        ErrorKind.DEADLINE,
    }
)
"""Kinds of a worker's error that other workers may not have. The request's own deadline is checked apart."""
TRANSFER_KINDS = (ErrorKind.TRANSFER_FAILED, ErrorKind.PEER_UNREACHABLE, ErrorKind.INCOMPATIBLE)
MAX_TRANSFER_FAILURES = 2
_PAUSES_SECONDS = (0.0, 0.0, 0.05, 0.2, 0.8, 2.0)
"""Before an attempt, by the number of failures in a row: the first replay begins at once."""


class Failures:
    """Owns the history of one answer's failures."""

    def __init__(self, severed: UnreachablePairs, max_replays: int) -> None:
        self._severed = severed
        self._max_replays = max_replays
        self._num_failures = 0
        self._num_transfer_failures = 0
        self._num_own_failures = 0
        self._suspects: set[AttachedWorker] = set()
        self._too_small: set[AttachedWorker] = set()
        self.prefer: str | None = None
        self.last: KvbatonError | None = None

    @property
    def avoid(self) -> frozenset[str]:
        """Ids of the workers that may be at fault and are still attached."""
        return frozenset(worker.name for worker in self._suspects if not worker.gone.is_set())

    @property
    def too_small(self) -> frozenset[str]:
        """Ids of the workers that refused the request because it is too long for them."""
        return frozenset(worker.name for worker in self._too_small if not worker.gone.is_set())

    @property
    def is_local(self) -> bool:
        """True when no further hand-over is tried."""
        return self._num_transfer_failures >= MAX_TRANSFER_FAILURES

    @property
    def pause_seconds(self) -> float:
        """Seconds to wait before the next attempt, so that attempts that fail at once are not used up at once."""
        count = max(self._num_failures, self._num_own_failures + 1 if self._num_own_failures else 0)
        return _PAUSES_SECONDS[min(count, len(_PAUSES_SECONDS) - 1)]

    def progress(self, attempt: Attempt) -> None:
        """Record that a token of the decode leg has come: nothing has failed in a row any more."""
        self._num_failures = self._num_transfer_failures = self._num_own_failures = 0
        if attempt.hand_over:
            self._severed.mend(*attempt.hand_over)

    def note(self, attempt: Attempt, error: KvbatonError) -> None:
        """Record why an attempt failed. Raises the error where no further attempt could help, or too many have failed."""
        failure = attempt.failure
        if failure is None:
            raise error
        self.last = error
        self.prefer = attempt.hand_over[0].name if attempt.hand_over else None
        if isinstance(error, RouterExhaustedError):
            self._num_own_failures += 1
            return
        if _is_about_size(error):
            self._too_small.add(failure.culprit)
            return
        if error.kind is ErrorKind.PEER_UNREACHABLE and attempt.hand_over:
            self._severed.cut(*attempt.hand_over)
        if not self._is_known_death(failure):
            self._num_failures += 1
            self._num_transfer_failures += error.kind in TRANSFER_KINDS
        if error.kind not in CURABLE or self._num_failures > self._max_replays:
            raise error
        self._suspects |= failure.suspects

    def _is_known_death(self, failure: Failure) -> bool:
        """One death costs one attempt: a peer may tell of it before its stream does, and a replay be bound there again.

        A worker that is gone takes no further attempt, so this excuses each at most once.
        """
        known = [worker.gone.is_set() and worker in self._suspects for worker in failure.suspects]
        return bool(known) and all(known)


def _is_about_size(error: KvbatonError) -> bool:
    """Whether a worker refused a request that another one may take: for its size, not for what it asks."""
    return error.kind is ErrorKind.INVALID_REQUEST and error.param == SIZE_PARAM
