"""Pairs of workers between which no KV can be handed over, though both are alive."""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from contract.errors import ErrorKind, KvbatonError
from router.workers.attached_worker import AttachedWorker

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 2.0
LAST_PAUSE_SECONDS = 60.0
_PROBE_SECONDS = 10.0
"""The time in which the one request that retries a pair must show that the pair works."""
_MAX_FAILED_TRANSFERS = 2
"""Transfers in a row that may fail before the pair counts as one that cannot hand over: a single one may have bad luck."""

Pair = tuple[str, str]


@dataclass(frozen=True)
class FailedPair:
    """A pair that cannot hand over KV. prefill, decode: worker ids. since: of the first failure, on the clock.

    until: no request is placed on the pair before; infinite if a new start of a worker alone can change it. pause_seconds:
    the length of that pause. is_probed: one request was placed on the pair when the pause before was over, and its result is
    not known yet.
    """

    prefill: str
    decode: str
    kind: ErrorKind
    message: str
    since: float
    until: float
    pause_seconds: float
    is_probed: bool = False

    def as_dict(self, now: float) -> dict[str, object]:
        """Return plain data for JSON."""
        return {
            "prefill": self.prefill,
            "decode": self.decode,
            "kind": self.kind.value,
            "message": self.message,
            "seconds": now - self.since,
        }


class UnreachablePairs:
    """Owns the last failure of each pair that could not hand over KV, by the sessions of both workers.

    A pair whose workers are incompatible is not chosen until one of them starts anew. Any other one is not chosen during a
    pause. When the pause is over, one request is placed on the pair, and no other until it has failed or its KV has arrived.
    If it fails the pause doubles; if its KV arrives the pair is forgotten.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: dict[Pair, FailedPair] = {}
        self._failed_transfers: Counter[Pair] = Counter()

    def __len__(self) -> int:
        return len(self._failures)

    def record_failure(self, prefill: AttachedWorker, decode: AttachedWorker, error: KvbatonError) -> None:
        """Record that no KV was handed over because of an error between the two."""
        key = (prefill.session, decode.session)
        known = self._failures.get(key)
        # an incompatible or unreachable peer is certain at the first failure; a single transfer may have had bad luck
        if error.kind is ErrorKind.TRANSFER_FAILED and known is None:
            self._failed_transfers[key] += 1
            if self._failed_transfers[key] < _MAX_FAILED_TRANSFERS:
                return
        pause = FIRST_PAUSE_SECONDS
        if known:  # requests that were placed before the first failure fail together: they must not lengthen the pause
            pause = known.pause_seconds * (2 if known.is_probed else 1)
        pause = min(pause, LAST_PAUSE_SECONDS)
        now = self._clock()
        # what is incompatible stays so until one of the two starts anew
        until = math.inf if error.kind is ErrorKind.INCOMPATIBLE else now + pause
        since = known.since if known else now
        self._failures[key] = FailedPair(
            prefill.name, decode.name, error.kind, error.message, since, until, pause
        )
        # once for a pair, and not for each request that was placed on it
        if known is None:
            logger.warning(
                "worker %s cannot hand KV over to worker %s (%s): %s; other pairs are chosen, or the decode worker computes "
                "prompts itself, until %s",
                *(prefill.name, decode.name, error.kind.value, error.message),
                "one of them starts anew" if math.isinf(until) else "a hand-over succeeds",
            )

    def record_success(self, prefill: AttachedWorker, decode: AttachedWorker) -> None:
        """Record that KV was handed over between the two."""
        key = (prefill.session, decode.session)
        self._failed_transfers.pop(key, None)
        if self._failures.pop(key, None):
            logger.info("worker %s hands KV over to worker %s again", prefill.name, decode.name)

    def record_probe(self, prefill: AttachedWorker, decode: AttachedWorker) -> None:
        """Record that a request was placed on the pair. That matters only after a failure, when the pause is over."""
        key = (prefill.session, decode.session)
        if known := self._failures.get(key):
            # until the probe has a result no other request risks the pair; a probe that is cancelled has none, so time
            # passes
            until = max(known.until, self._clock() + max(known.pause_seconds, _PROBE_SECONDS))
            self._failures[key] = replace(known, until=until, is_probed=True)

    def blocked(self, workers: Iterable[AttachedWorker]) -> frozenset[Pair]:
        """Return the pairs of worker ids, prefill first, that must not be chosen now; forget workers that are gone."""
        now = self._clock()
        return frozenset((pair.prefill, pair.decode) for pair in self.failed(workers) if now < pair.until)

    def failed(self, workers: Iterable[AttachedWorker]) -> list[FailedPair]:
        """Return the pairs whose last hand-over has failed, of workers that are attached; forget the others."""
        if self._failures or self._failed_transfers:
            # a worker that starts again has another session, so nothing is known of its pairs
            sessions = {worker.session for worker in workers}
            for counts in (self._failures, self._failed_transfers):
                for key in [key for key in counts if not sessions.issuperset(key)]:
                    del counts[key]
        return list(self._failures.values())

    def facts(self, workers: Iterable[AttachedWorker]) -> list[dict[str, object]]:
        """Return ``failed`` as plain data."""
        now = self._clock()
        return [pair.as_dict(now) for pair in self.failed(workers)]
