"""The names of all metrics, and the conversion of plain counters to Prometheus families.

The text format is always 0.0.4: newer formats rename metrics that dashboards use.
"""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

PREFIX = "kvbaton_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

ENGINE_METRICS = {
    "num_requests_running": "Requests in the running batch.",
    "num_requests_waiting": "Requests that wait for a place in the batch, or for their KV.",
    "kv_cache_usage_perc": "Used share of the KV blocks, 0..1.",
    "num_blocks": "KV blocks of the pool, by state.",
    "prefix_cache_queries_total": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits_total": "Prompt tokens found in the prefix cache.",
    "prompt_tokens_total": "Prompt tokens computed.",
    "generation_tokens_total": "Tokens sampled.",
    "step_held_seconds_total": "Seconds of delayed and interrupted steps, so that arriving requests could join.",
    "num_preemptions_total": "Requests taken out of the batch to free their blocks.",
    "transfer_blocks_total": "KV blocks received from other workers, by transport.",
    "transfer_bytes_total": "Bytes of KV received from other workers, by transport.",
    "transfer_needed_blocks_total": "KV blocks that reservations needed beyond the prefix cache.",
    "transfer_failures_total": "Transfers that ended without usable KV, by error kind.",
    "transfer_fallbacks_total": "Transfers that used a slower path than the chosen one.",
    "transfer_pulled_again_total": "Failed reads that were retried for the same blocks, by retry step.",
    "transfer_transport_left_total": "Transports that a link no longer uses after consecutive failed transfers.",
    "transfer_digest_mismatches_total": "Blocks whose received bytes did not match the published digest.",
    "transfer_converting_links_total": "Links over which KV of another block size or dtype is converted.",
    "transfer_converted_blocks_total": "KV blocks converted from blocks of another size or dtype.",
    "transfer_staging_bytes": "Bytes of memory for blocks that are converted, on the pool's device.",
    "transfer_transport_chosen_total": "Links by the transport that their reads use, and the reason for it.",
    "link_handshakes_total": "Handshakes of control links, by result.",
    "leases_active": "Prompts whose KV is under a lease.",
    "leases_expired_total": "Leases that expired without a fetch or a renewal.",
    "transfers_parked": "Fetches of transfers that have not been offered yet.",
    "fetches_active": "Prompts whose KV is being fetched.",
    "transfers_quarantined": "Cancelled fetches with a read that may still write.",
    "requests_total": "Requests that this engine received.",
    "requests_finished_total": "Requests that ended without an error.",
    "requests_failed_total": "Requests that ended with an error.",
    "requests_corrupted_total": "Requests that ended because of NaN logits.",
    "steps_total": "Steps of the engine.",
    "cached_tokens_total": "Prompt tokens found in the prefix cache.",
    "received_tokens_total": "Prompt tokens whose KV was fetched from another worker.",
}
"""Name without the prefix → help. Names that end in ``_total`` are counters, all others gauges."""

ROUTER_METRICS = {
    "num_requests_waiting": "Requests without a first token yet.",
    "num_requests_running": "Requests whose answer is being streamed.",
    "num_workers": "Attached workers, by role.",
    "time_to_first_token_seconds": "Time from arrival to the first token.",
    "inter_token_latency_seconds": "Time between two tokens of an answer.",
    "e2e_request_latency_seconds": "Time from arrival to the last token.",
    "request_queue_time_seconds": "Time from arrival to the start of the prompt's first chunk.",
    "request_prefill_time_seconds": "Time of computing the prompt.",
    "request_transfer_time_seconds": "Exposed time of the KV transfer.",
    "request_decode_time_seconds": "Time of the first decode step and the rest of the answer.",
    "prompt_tokens_total": "Prompt tokens of finished requests.",
    "generation_tokens_total": "Tokens delivered.",
    "request_success_total": "Finished requests, by finished_reason.",
    "request_errors_total": "Requests that ended with an error, by kind.",
    "request_replays_total": "Failed attempts that were followed by another, by error kind.",
    "request_local_recomputes_total": "Replays whose prompt a decode worker computed.",
    "drains_total": "Drains of workers, by result: empty, moved (legs were left at the deadline), undone or lost.",
    "drain_seconds": "Time from the beginning of a worker's drain to its result.",
    "migrations_total": "Moves of answers to another worker while they are decoded, by result: moved, ended (the answer was "
    "over first), refused (it stays), no_target, or replayed (its KV is computed again).",
    "migration_pause_seconds": "Time between the last token of an answer before a move and the first one after it.",
    "flips_total": "Workers that have taken another role, by this role.",
    "num_batches": "Stored batches, by status.",
    "num_file_bytes": "Bytes of stored files, with uploads and results of open batches.",
    "batch_requests_total": "Requests of batches, by outcome: completed, failed, expired, retried or preempted.",
}
"""The router's metrics, in the same form; names that end in ``_seconds`` are histograms."""


def render(*collectors: Collector) -> bytes:
    """Return the metrics of all collectors in the text format 0.0.4. Raises ValueError for a duplicate name."""
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    return generate_latest(registry)


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
    """A snapshot of an engine's plain counters, as ``kvbaton_*`` families."""

    def __init__(self, counters: Mapping[str, float], labels: Mapping[str, str] | None = None) -> None:
        """Store ``counters``, name → value, labels as in ``name_total{transport=tcp}``; add ``labels`` to each sample."""
        self._counters = dict(counters)
        self._labels = dict(labels or {})

    def describe(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        """Return nothing: the families depend on the counters."""
        return ()

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Yield one family per name, in the engine's order."""
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for counter, value in self._counters.items():
            name, labels = parse_counter_name(counter)
            if name not in families:
                families[name] = _family(name)
            families[name].add_sample(f"{PREFIX}{name}", {**self._labels, **labels}, value)
        yield from families.values()


def _family(name: str) -> CounterMetricFamily | GaugeMetricFamily:
    text = ENGINE_METRICS.get(name, name.replace("_", " ").capitalize() + ".")
    if name.endswith("_total"):
        return CounterMetricFamily(f"{PREFIX}{name.removesuffix('_total')}", text)
    return GaugeMetricFamily(f"{PREFIX}{name}", text)
