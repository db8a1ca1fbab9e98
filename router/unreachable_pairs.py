"""Pairs of workers between which no KV can be handed over, though both are alive."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from router.registry import AttachedWorker

FIRST_PAUSE_SECONDS = 2.0
LAST_PAUSE_SECONDS = 60.0
_PROBE_SECONDS = 10.0
"""How long the one request that tries a pair again may take to show that it works."""

Pair = tuple[str, str]


@dataclass(frozen=True)
class _Cut:
    """A pair's last failure.

    until: no request is placed on the pair before. pause_seconds: the length of that pause. is_probed: one request was
    placed on the pair when the pause before was over, and its result is not known yet.
    """

    until: float
    pause_seconds: float
    is_probed: bool = False


class UnreachablePairs:
    """Owns the memory of the pairs that could not reach each other, by the sessions of both workers.

    A pair is not chosen during a pause. When the pause is over, one request is placed on the pair, and no other until it has
    failed or its KV has arrived. If it fails the pause doubles; if its KV arrives the pair is forgotten.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._cuts: dict[Pair, _Cut] = {}

    def cut(self, prefill: AttachedWorker, decode: AttachedWorker) -> None:
        """Record that a request failed because one worker could not reach the other."""
        key = (prefill.session, decode.session)
        known = self._cuts.get(key)
        pause = FIRST_PAUSE_SECONDS
        if known:  # requests that were placed before the first failure fail together: they lengthen nothing
            pause = known.pause_seconds * (2 if known.is_probed else 1)
        pause = min(pause, LAST_PAUSE_SECONDS)
        self._cuts[key] = _Cut(self._clock() + pause, pause)

    def mend(self, prefill: AttachedWorker, decode: AttachedWorker) -> None:
        """Record that KV was handed over between the two."""
        self._cuts.pop((prefill.session, decode.session), None)

    def probe(self, prefill: AttachedWorker, decode: AttachedWorker) -> None:
        """Record that a request was placed on the pair. Matters only if the pair was severed and its pause is over."""
        key = (prefill.session, decode.session)
        if known := self._cuts.get(key):
            until = self._clock() + max(known.pause_seconds, _PROBE_SECONDS)
            self._cuts[key] = _Cut(until, known.pause_seconds, is_probed=True)

    def among(self, workers: Iterable[AttachedWorker]) -> frozenset[Pair]:
        """Return the pairs of worker ids, prefill first, that must not be chosen now; forget workers that have gone."""
        if not self._cuts:
            return frozenset()
        names = {worker.session: worker.name for worker in workers}
        now = self._clock()
        self._cuts = {key: cut for key, cut in self._cuts.items() if set(key) <= names.keys()}
        return frozenset((names[p], names[d]) for (p, d), cut in self._cuts.items() if now < cut.until)
