"""Metrics of events that happen for every token, for one thread.

Those of ``prometheus_client`` take locks and compare a value with each bucket, which costs microseconds an event.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector


class EventCounter(Collector):
    """A sum that only grows. name: ends in ``_total``."""

    def __init__(self, registry: CollectorRegistry, name: str, text: str) -> None:
        self._name = name
        self._text = text
        self.value = 0.0
        registry.register(self)

    def add(self, amount: float) -> None:
        """Add an amount that is not negative."""
        self.value += amount

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the family."""
        yield CounterMetricFamily(self._name.removesuffix("_total"), self._text, value=self.value)


class TallyCounter(Collector):
    """Sums by the value of one label, which their owner counts. name: ends in ``_total``."""

    def __init__(self, registry: CollectorRegistry, name: str, text: str, label: str) -> None:
        self._name = name
        self._text = text
        self._label = label
        self._sums: Mapping[str, float] = {}
        registry.register(self)

    def set(self, sums: Mapping[str, float]) -> None:
        """Take the sums of now, by the label's value."""
        self._sums = sums

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the family."""
        family = CounterMetricFamily(self._name.removesuffix("_total"), self._text, labels=[self._label])
        for value, total in self._sums.items():
            family.add_metric([value], total)
        yield family


class OptionalGauge(Collector):
    """A value that is not published while it is None."""

    def __init__(self, registry: CollectorRegistry, name: str, text: str) -> None:
        self.value: float | None = None
        self._name = name
        self._text = text
        registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the family."""
        family = GaugeMetricFamily(self._name, self._text)
        if self.value is not None:
            family.add_metric([], self.value)
        yield family


class EventHistogram(Collector):
    """Counts of values, in buckets. bounds: the upper bound of each bucket but the last one, in order."""

    def __init__(self, registry: CollectorRegistry, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        """Count a value in the first bucket whose bound is not below it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def counts(self) -> list[int]:
        """Return how many values each bucket has, the one without a bound last."""
        return list(self._counts)

    def quantile(self, counts: Sequence[int], share: float) -> float | None:
        """Return the value below which this share of ``counts`` is, between the bounds of its bucket; None without values.

        counts: of this histogram's buckets. Values above all bounds count as the highest one.
        """
        rank = share * sum(counts)
        lower = 0.0
        for bound, count in zip(self._bounds, counts, strict=False):
            if count and rank <= count:
                return lower + (bound - lower) * rank / count
            rank -= count
            lower = bound
        return lower if sum(counts) else None

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the family."""
        names = [*map(str, self._bounds), "+Inf"]
        buckets = [(name, float(count)) for name, count in zip(names, accumulate(self._counts), strict=True)]
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)
