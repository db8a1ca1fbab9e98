"""Metrics: plain counters become Prometheus families, whose names are in ``serving.metric_names``, with their aliases.

An alias is another engine's name, so that dashboards and autoscalers that read those names work unchanged. The text format
is always 0.0.4: newer formats rename metrics that dashboards use. Metrics of events that happen for every token are for one
thread: those of ``prometheus_client`` take locks and compare a value with each bucket, which costs microseconds an event.
"""

import asyncio
import math
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Annotated, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from pydantic import AfterValidator

from contract.options import Options
from serving.metric_names import PREFIX, WORKER_METRICS, Metric, kind_of
from serving.settings import listed

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
            # The samples of a histogram are those of its buckets, its sum and its count.
            name = sample.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
            if name not in WORKER_METRICS or not WORKER_METRICS[name].is_histogram:
                name = sample
            if name not in families:
                families[name] = make_family(name, WORKER_METRICS.get(name))
            families[name].add_sample(f"{PREFIX}{sample}", labels, value)
        yield from families.values()


def make_family(name: str, metric: Metric | None) -> Family:
    """Return a family without samples. metric: None if the name is not declared."""
    metric = metric or Metric(name.replace("_", " ").capitalize() + ".")
    return Family(f"{PREFIX}{name.removesuffix('_total')}", metric.text, kind_of(name, metric))


class Alias(NamedTuple):
    """A second name of a metric."""

    name: str
    metric: str


_LATENCIES = ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds")

ALIASES: Mapping[str, tuple[Alias, ...]] = {
    "vllm": (
        *(
            Alias(f"vllm:{name}", name)
            for name in (
                "num_requests_running",
                "num_requests_waiting",
                "kv_cache_usage_perc",
                "prefix_cache_queries_total",
                "prefix_cache_hits_total",
                "spec_decode_num_drafts_total",
                "spec_decode_num_draft_tokens_total",
                "spec_decode_num_accepted_tokens_total",
                "spec_decode_num_accepted_tokens_per_pos_total",
                "prompt_tokens_total",
                "generation_tokens_total",
                "num_preemptions_total",
                "request_success_total",
                *_LATENCIES,
                "request_prompt_tokens",
                "request_generation_tokens",
                "request_queue_time_seconds",
                "request_prefill_time_seconds",
                "request_decode_time_seconds",
            )
        ),
        Alias("vllm:nixl_xfer_time_seconds", "transfer_seconds"),
        Alias("vllm:nixl_bytes_transferred", "transfer_size_bytes"),
        Alias("vllm:nixl_num_failed_transfers_total", "transfer_failures_total"),
        Alias("vllm:nixl_num_kv_expired_reqs_total", "leases_expired_total"),
    ),
    "sglang": (
        Alias("sglang:num_running_reqs", "num_requests_running"),
        Alias("sglang:num_queue_reqs", "num_requests_waiting"),
        Alias("sglang:token_usage", "kv_cache_usage_perc"),
        Alias("sglang:num_prefill_inflight_queue_reqs", "leases_active"),
        Alias("sglang:num_decode_transfer_queue_reqs", "fetches_active"),
        Alias("sglang:num_transfer_failed_reqs_total", "transfer_failures_total"),
        Alias("sglang:prompt_tokens_total", "prompt_tokens_total"),
        Alias("sglang:generation_tokens_total", "generation_tokens_total"),
        *(Alias(f"sglang:{name}", name) for name in _LATENCIES),
    ),
}
"""The aliases of each engine, by its name in the setting."""


def _check_engines(value: str) -> str:
    unknown = sorted(set(listed(value)) - set(ALIASES))
    if unknown:
        raise ValueError(f"{unknown[0]!r} is unknown; choose among {', '.join(ALIASES)}")
    return value


class MetricsOptions(Options):
    """The settings of /metrics."""

    metrics_aliases: Annotated[str, AfterValidator(_check_engines)] | None = None
    """Engines, separated by commas, under whose names metrics are published a second time: vllm, sglang."""

    @property
    def aliases(self) -> tuple[Alias, ...]:
        """All chosen aliases."""
        return tuple(alias for engine in listed(self.metrics_aliases or "") for alias in ALIASES[engine])


class AliasCollector(Collector):
    """Yields the families of another collector, and after them those that have an alias under this name too.

    model_name: returns the label ``model_name``, which other engines' dashboards select by.
    """

    def __init__(self, source: Collector, aliases: Iterable[Alias], model_name: Callable[[], str]) -> None:
        self._source = source
        self._aliases = tuple(aliases)
        self._model_name = model_name

    def describe(self) -> Iterable[Family]:
        """Return nothing: the families are those of the source."""
        return ()

    def collect(self) -> Iterator[Family]:
        """Yield the families."""
        families = list(self._source.collect())
        yield from families
        by_name = {family.name.removeprefix(PREFIX): family for family in families}
        model = {"model_name": self._model_name()}
        for alias in self._aliases:
            if family := by_name.get(alias.metric.removesuffix("_total")):
                base = alias.name.removesuffix("_total")
                renamed = Family(base, family.documentation, family.type)
                for sample in family.samples:
                    ending = sample.name.removeprefix(family.name)
                    renamed.add_sample(base + ending, {**model, **sample.labels}, sample.value)
                yield renamed


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
