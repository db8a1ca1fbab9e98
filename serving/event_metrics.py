"""Metrics of events that happen for every token, for one thread.

Those of ``prometheus_client`` take locks and compare a value with each bucket, which costs microseconds an event.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector


class EventCounter(Collector):
    """A sum that only grows. name: ends in ``_total``."""

    def __init__(self, registry: CollectorRegistry, name: str, text: str) -> None:
        self._name = name
        self._text = text
        self._value = 0.0
        registry.register(self)

    def add(self, amount: float) -> None:
        """Add an amount that is not negative."""
        self._value += amount

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the family."""
        yield CounterMetricFamily(self._name.removesuffix("_total"), self._text, value=self._value)


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

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield the family."""
        names = [*map(str, self._bounds), "+Inf"]
        buckets = [(name, float(count)) for name, count in zip(names, accumulate(self._counts), strict=True)]
        yield HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)
