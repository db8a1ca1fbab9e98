"""The counts of routers over the last minutes, and the load that they show. Pure: the caller fetches the texts."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from autoscaler.signals import LoadSignals

_PREFIX = "kvbaton_"
_RATE_SECONDS = 20.0
_LATENCY_SECONDS = 30.0
_LENGTH_SECONDS = 180.0
_P90_OF_MEAN = 2.3
"""The 90th percentile of exponentially distributed lengths, as a multiple of the mean: routers count no lengths."""
_SUMS = (
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "request_errors_total",
    "num_requests_waiting",
    "num_requests_running",
)
_HISTOGRAMS = ("time_to_first_token_seconds", "inter_token_latency_seconds")


@dataclass(frozen=True)
class RouterCounts:
    """The counts of one router at one time. buckets: by histogram and upper bound. queue_seconds: its longest queue."""

    sums: Mapping[str, float]
    buckets: Mapping[str, Mapping[float, float]]
    queue_seconds: float = 0.0


def parse_counts(text: str) -> RouterCounts:
    """Read the metrics of a router. Raises ValueError for a text that is none of Prometheus'."""
    sums = dict.fromkeys(_SUMS, 0.0)
    buckets: dict[str, dict[float, float]] = {name: {} for name in _HISTOGRAMS}
    queue_seconds = 0.0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix(_PREFIX)
            histogram = name.removesuffix("_bucket")
            if name in sums:
                sums[name] += sample.value
            elif histogram in buckets and "le" in sample.labels:
                buckets[histogram][float(sample.labels["le"])] = sample.value
            elif name == "queue_seconds":
                queue_seconds = max(queue_seconds, sample.value)
    return RouterCounts(sums, buckets, queue_seconds)


@dataclass(frozen=True)
class WorkerFigures:
    """Figures of the workers. num_prefill_legs: prompts that are bound to prefill workers. hit_rate: of their caches."""

    num_prefill_legs: int = 0
    hit_rate: float = 0.0
    step_seconds: float | None = None
    prefill_seconds_per_token: float | None = None


@dataclass
class CountHistory:
    """Owns the counts of the last minutes, by router. A router that was started again counts from its start on."""

    _readings: deque[tuple[float, Mapping[str, RouterCounts]]] = field(default_factory=deque)

    def add(self, now: float, routers: Mapping[str, RouterCounts]) -> None:
        """Add the counts of the routers that have answered. Times never decrease."""
        self._readings.append((now, routers))
        while self._readings[0][0] < now - _LENGTH_SECONDS:
            self._readings.popleft()

    def load(self, figures: WorkerFigures) -> LoadSignals | None:
        """Return the load; None before there are two readings, and if the last one has no router."""
        if len(self._readings) < 2 or not self._readings[-1][1]:
            return None
        now, last = self._readings[-1]
        sums = {name: self._growth(_LENGTH_SECONDS, name) for name in _SUMS}
        num_done = sums["request_success_total"]
        prompt_tokens = sums["prompt_tokens_total"] / num_done if num_done else 0.0
        uncached = prompt_tokens * (1.0 - figures.hit_rate)
        num_waiting = sum(counts.sums["num_requests_waiting"] for counts in last.values())
        num_unbound = max(0, round(num_waiting) - figures.num_prefill_legs)
        return LoadSignals(
            arrival_rate=max(0.0, self._num_arrived()) / (now - self._since(_RATE_SECONDS)),
            prompt_tokens=prompt_tokens,
            uncached_prompt_tokens=uncached,
            uncached_prompt_tokens_p90=_P90_OF_MEAN * uncached,
            answer_tokens=sums["generation_tokens_total"] / num_done if num_done else 0.0,
            ttft_p90=self._p90("time_to_first_token_seconds"),
            itl_p90=self._p90("inter_token_latency_seconds"),
            queue_seconds=max(counts.queue_seconds for counts in last.values()) if num_unbound else 0.0,
            num_waiting=num_unbound,
            step_seconds=figures.step_seconds,
            prefill_seconds_per_token=figures.prefill_seconds_per_token,
        )

    def _num_arrived(self) -> float:
        """Return the requests that have ended lately, and those that are held more than then."""
        return sum(
            self._growth(_RATE_SECONDS, name, is_gauge=name.startswith("num_"))
            for name in _SUMS
            if "tokens" not in name
        )

    def _since(self, seconds: float) -> float:
        """Return the time of the first reading of the last ``seconds``; of the one before, if there is only one."""
        return self._first(seconds)[0]

    def _first(self, seconds: float) -> tuple[float, Mapping[str, RouterCounts]]:
        now, _ = self._readings[-1]
        within = [reading for reading in self._readings if reading[0] >= now - seconds]
        return within[0] if len(within) > 1 else self._readings[-2]

    def _growth(self, seconds: float, name: str, *, is_gauge: bool = False) -> float:
        _, before = self._first(seconds)
        total = 0.0
        for router, counts in self._readings[-1][1].items():
            value = counts.sums[name]
            former = before[router].sums[name] if router in before else 0.0
            total += value - former if is_gauge or value >= former else value
        return total

    def _p90(self, histogram: str) -> float | None:
        """Return the 90th percentile of the last seconds, interpolated within its bucket; None without samples."""
        _, before = self._first(_LATENCY_SECONDS)
        grown: dict[float, float] = {}
        for router, counts in self._readings[-1][1].items():
            former = before[router].buckets[histogram] if router in before else {}
            for bound, number in counts.buckets[histogram].items():
                earlier = former.get(bound, 0.0)
                grown[bound] = grown.get(bound, 0.0) + (number - earlier if number >= earlier else number)
        return percentile(sorted(grown.items()), 0.9)


def percentile(buckets: Sequence[tuple[float, float]], share: float) -> float | None:
    """Return a percentile of cumulative buckets (upper bound, number), as Prometheus does; None without samples."""
    if not buckets or buckets[-1][1] <= 0:
        return None
    rank = share * buckets[-1][1]
    low = 0.0
    below = 0.0
    for bound, number in buckets:
        if number >= rank:
            if bound == float("inf"):
                return low
            return low + (bound - low) * ((rank - below) / (number - below) if number > below else 1.0)
        low = bound
        below = number
    return low
