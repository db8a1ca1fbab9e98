"""The metrics of attempts after the first one, and how counters are made and read."""

from prometheus_client import CollectorRegistry, Counter

from contract.errors import ErrorKind
from serving.metric_names import PREFIX, ROUTER_METRICS


class ReplayMetrics:
    """The attempts after the first one, and the prompts that are computed again."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._replays = new_counter(registry, "request_replays_total")
        self._local = new_counter(registry, "request_local_recomputes_total")
        self._prompts = new_counter(registry, "recomputed_prompts_total")
        self._tokens = new_counter(registry, "recomputed_prompt_tokens_total")
        for reason in ("replay", "local"):  # a rate needs a count that begins with 0
            self._prompts.labels(reason)
            self._tokens.labels(reason)

    @property
    def num_recomputed(self) -> int:
        """The number of prompts that were computed again."""
        return sum_of(self._prompts)

    @property
    def total(self) -> int:
        """The number of attempts that were replayed."""
        return sum_of(self._replays)

    def on_replayed(self, kind: ErrorKind) -> None:
        """Count a failed attempt that another one follows."""
        self._replays.labels(kind.value).inc()

    def on_recomputed(self, num_tokens: int, *, is_local: bool) -> None:
        """Count a prompt that is computed for a replay, or by a decode worker, and its tokens."""
        reason = "local" if is_local else "replay"
        self._prompts.labels(reason).inc()
        self._tokens.labels(reason).inc(num_tokens)
        if is_local:
            self._local.inc()


def new_counter(registry: CollectorRegistry, name: str) -> Counter:
    """Make the counter of this name in ``ROUTER_METRICS``."""
    metric = ROUTER_METRICS[name]
    return Counter(PREFIX + name, metric.text, metric.labels, registry=registry)


def sum_of(counter: Counter) -> int:
    """Return the sum of a counter over all labels."""
    samples = (sample for family in counter.collect() for sample in family.samples)
    return int(sum(sample.value for sample in samples if sample.name.endswith("_total")))
