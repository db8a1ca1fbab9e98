"""Other engines' names for our metrics, so that dashboards and autoscalers that read those names work unchanged."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, NamedTuple

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from pydantic import AfterValidator

from contract.options import Options
from serving.metric_names import PREFIX
from serving.settings import listed


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
                yield _renamed(family, alias, model)


def _renamed(family: Family, alias: Alias, model: Mapping[str, str]) -> Family:
    base = alias.name.removesuffix("_total")
    renamed = Family(base, family.documentation, family.type)
    for sample in family.samples:
        ending = sample.name.removeprefix(family.name)
        renamed.add_sample(base + ending, {**model, **sample.labels}, sample.value)
    return renamed
