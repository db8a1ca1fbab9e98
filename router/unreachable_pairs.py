"""Pairs of workers between which no KV can be handed over, though both are alive."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from router.attached_worker import AttachedWorker

FIRST_PAUSE_SECONDS = 2.0
LAST_PAUSE_SECONDS = 60.0
_PROBE_SECONDS = 10.0
"""The time in which the one request that retries a pair must show that the pair works."""

Pair = tuple[str, str]


@dataclass(frozen=True)
class _Failure:
    """A pair's last failure.

    until: no request is placed on the pair before. pause_seconds: the length of that pause. is_probed: one request was
    placed on the pair when the pause before was over, and its result is not known yet.
    """

    until: float
    pause_seconds: float
    is_probed: bool = False


class UnreachablePairs:
    """Owns the last failure of each pair that could not hand over KV, by the sessions of both workers.

    A pair is not chosen during a pause. When the pause is over, one request is placed on the pair, and no other until it has
    failed or its KV has arrived. If it fails the pause doubles; if its KV arrives the pair is forgotten.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: dict[Pair, _Failure] = {}

    def __len__(self) -> int:
        return len(self._failures)

    def record_failure(self, prefill: AttachedWorker, decode: AttachedWorker) -> None:
        """Record that a request failed because one worker could not reach the other."""
        key = (prefill.session, decode.session)
        known = self._failures.get(key)
        pause = FIRST_PAUSE_SECONDS
        if known:  # requests that were placed before the first failure fail together: they must not lengthen the pause
            pause = known.pause_seconds * (2 if known.is_probed else 1)
        pause = min(pause, LAST_PAUSE_SECONDS)
        self._failures[key] = _Failure(self._clock() + pause, pause)

    def record_success(self, prefill: AttachedWorker, decode: AttachedWorker) -> None:
        """Record that KV was handed over between the two."""
        self._failures.pop((prefill.session, decode.session), None)

    def record_probe(self, prefill: AttachedWorker, decode: AttachedWorker) -> None:
        """Record that a request was placed on the pair. That matters only after a failure, when the pause is over."""
        key = (prefill.session, decode.session)
        if known := self._failures.get(key):
            until = self._clock() + max(known.pause_seconds, _PROBE_SECONDS)
            self._failures[key] = _Failure(until, known.pause_seconds, is_probed=True)

    def blocked(self, workers: Iterable[AttachedWorker]) -> frozenset[Pair]:
        """Return the pairs of worker ids, prefill first, that must not be chosen now; forget workers that are gone."""
        if not self._failures:
            return frozenset()
        names = {worker.session: worker.name for worker in workers}
        now = self._clock()
        self._failures = {key: failure for key, failure in self._failures.items() if set(key) <= names.keys()}
        return frozenset(
            (names[p], names[d]) for (p, d), failure in self._failures.items() if now < failure.until
        )
