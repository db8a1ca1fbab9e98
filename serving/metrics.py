"""The conversion of plain counters to Prometheus families. The names are in ``serving.metric_names``.

The text format is always 0.0.4: newer formats rename metrics that dashboards use.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from serving.metric_names import PREFIX, WORKER_METRICS, Metric, kind_of

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render(*collectors: Collector) -> bytes:
    """Return the metrics of all collectors in the text format 0.0.4. Raises ValueError for a duplicate name."""
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    return generate_latest(registry)


class MetricsPage:
    """The metrics as text, rendered at most once in ``seconds``: a page that many clients read costs as one does.

    collector: returns the metrics of this moment. clock: returns seconds.
    """

    def __init__(
        self,
        collector: Callable[[], Awaitable[Collector]],
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._collector = collector
        self._seconds = seconds
        self._clock = clock
        self._rendering = asyncio.Lock()
        self._text = b""
        self._expiry = -math.inf

    async def text(self) -> bytes:
        """Return the text of this moment, or one that is younger than ``seconds``."""
        async with self._rendering:
            if self._clock() >= self._expiry:
                self._text = render(await self._collector())
                self._expiry = self._clock() + self._seconds
            return self._text


def parse_counter_name(name: str) -> tuple[str, dict[str, str]]:
    """Split ``transfer_blocks_total{transport=tcp,peer=p0}`` into its name and labels.

    Raises ValueError for a label without a value.
    """
    bare, brace, rest = name.partition("{")
    labels: dict[str, str] = {}
    if brace:
        for part in rest.removesuffix("}").split(","):
            label, equals, value = part.partition("=")
            if not equals:
                raise ValueError(f"{name!r}: label {label!r} has no value")
            labels[label.strip()] = value.strip().strip('"')
    return bare, labels


class EngineCollector(Collector):
    """A snapshot of an engine's plain counters, as ``kvbaton_*`` families.

    A histogram is given as its samples: ``name_bucket{le=0.1}`` (cumulative), ``name_sum`` and ``name_count``.
    """

    def __init__(self, counters: Mapping[str, float], info: Mapping[str, str]) -> None:
        """Store ``counters``, name → value, labels as in ``name_total{transport=tcp}``. info: facts about the worker."""
        self._counters = dict(counters)
        self._info = dict(info)

    def describe(self) -> Iterable[Family]:
        """Return nothing: the families depend on the counters."""
        return ()

    def collect(self) -> Iterator[Family]:
        """Yield the worker's facts, and then one family per name, in the engine's order."""
        facts = make_family("worker_info", WORKER_METRICS["worker_info"])
        facts.add_sample(facts.name, self._info, 1.0)
        yield facts
        families: dict[str, Family] = {}
        for counter, value in self._counters.items():
            sample, labels = parse_counter_name(counter)
            name = _metric_of(sample)
            if name not in families:
                families[name] = make_family(name, WORKER_METRICS.get(name))
            families[name].add_sample(f"{PREFIX}{sample}", labels, value)
        yield from families.values()


def make_family(name: str, metric: Metric | None) -> Family:
    """Return a family without samples. metric: None if the name is not declared."""
    metric = metric or Metric(name.replace("_", " ").capitalize() + ".")
    return Family(f"{PREFIX}{name.removesuffix('_total')}", metric.text, kind_of(name, metric))


def _metric_of(sample: str) -> str:
    """Return the name of the metric that a sample belongs to: that of the histogram for its buckets, sum and count."""
    name = sample.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
    return name if name in WORKER_METRICS and WORKER_METRICS[name].is_histogram else sample
