"""The goals of latency, and how many requests meet them."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from serving.metric_names import ROUTER_METRICS
from serving.metrics import make_family

SLOS = ("ttft", "itl", "all")
_RESULTS = ("met", "missed")
_NAME = "slo_requests_total"


@dataclass(frozen=True)
class Goals:
    """The time to the first token, and the mean time between the tokens of one answer, that requests should not exceed."""

    ttft_seconds: float = 1.0
    itl_seconds: float = 0.1


class GoalCounts(Collector):
    """Counts the requests that met or missed each goal. For one thread."""

    def __init__(self, registry: CollectorRegistry, goals: Goals) -> None:
        self.goals = goals
        self._counts = [0] * (len(SLOS) * len(_RESULTS))
        registry.register(self)

    def on_answer(self, ttft: float, itl: float | None) -> None:
        """Count a complete answer. itl: None if it has one token."""
        goals = self.goals
        counts = self._counts
        has_missed_first = ttft > goals.ttft_seconds
        has_missed_next = itl is not None and itl > goals.itl_seconds
        # met and missed are neighbours, so that a bool is the offset: this runs for each answer
        counts[has_missed_first] += 1
        if itl is not None:
            counts[2 + has_missed_next] += 1
        counts[4 + (has_missed_first or has_missed_next)] += 1

    def on_failure(self) -> None:
        """Count a request that has failed by no fault of its client: it has missed all goals."""
        for missed in (1, 3, 5):
            self._counts[missed] += 1

    def counts(self) -> list[int]:
        """Return the counts, met and missed for each of ``SLOS`` in order."""
        return list(self._counts)

    def collect(self) -> Iterator[Family]:
        """Yield the family."""
        family = make_family(_NAME, ROUTER_METRICS[_NAME])
        labels = [{"slo": slo, "result": result} for slo in SLOS for result in _RESULTS]
        for each, count in zip(labels, self._counts, strict=True):
            family.add_sample(f"{family.name}_total", each, count)
        yield family


def attainment(counts: Sequence[int]) -> dict[str, float]:
    """Return the share of requests that met each goal. A goal without requests is left out."""
    pairs = zip(SLOS, counts[::2], counts[1::2], strict=True)
    return {slo: met / (met + missed) for slo, met, missed in pairs if met + missed}


class RecentCounts:
    """The growth of counts within the last ``seconds``. read: returns the counts, which only grow.

    The counts of the past are those of ``sample`` calls, so the time is exact to the interval between two of them.
    """

    def __init__(
        self, read: Callable[[], Sequence[int]], seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read = read
        self._seconds = seconds
        self._clock = clock
        self._samples = deque([(clock(), read())])

    def sample(self) -> None:
        """Remember the counts of now, and forget those that are not needed any more."""
        now = self._clock()
        self._samples.append((now, self._read()))
        # one sample that is old enough is kept, as the beginning of the time that is looked at
        while len(self._samples) > 1 and self._samples[1][0] <= now - self._seconds:
            self._samples.popleft()

    def rates(self) -> list[float]:
        """Return by how much each count has grown, per second."""
        seconds = self._clock() - self._samples[0][0]
        return [growth / seconds if seconds > 0 else 0.0 for growth in self.growth()]

    def growth(self) -> list[int]:
        """Return by how much each count has grown."""
        _, before = self._samples[0]
        return [now - then for now, then in zip(self._read(), before, strict=True)]
