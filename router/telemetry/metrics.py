"""The metrics of a router. Names, labels and help texts are in ``serving.metric_names``; to add a metric, begin there."""

from collections import Counter as Tally
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from contract.errors import TRANSFER_KINDS, ErrorKind
from contract.identity import WORKER_ROLES, Role
from contract.outputs import FinishReason
from contract.scaling import HOLDS, PoolScaling
from router.answers.answer import Usage
from router.answers.timings import Timings
from router.batches.records import BatchStatus
from router.telemetry.goals import GoalCounts, Goals, RecentCounts, attainment
from router.telemetry.migration_record import MigrationRecord
from router.telemetry.pool_state import PoolLoad, RecentLatency
from router.telemetry.replay_metrics import ReplayMetrics, new_counter, sum_of
from router.workers.worker_facts import ShownState
from serving.metric_names import PREFIX, ROUTER_METRICS
from serving.metrics import EventCounter, EventHistogram, OptionalGauge, TallyCounter

_LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKENS = tuple(float(first * 10**power) for power in range(6) for first in (1, 2, 5))
_NUM_RECENT_MOVES = 256
_MAX_KEYS = 64
_KEY_CHARACTERS = 12
_LATENCY_SECONDS = 30.0
_ATTAINMENT_SECONDS = 60.0
_RATES = (
    "requests_per_second",
    "tokens_per_second",
    "errors_per_second",
    "replays_per_second",
    "recomputed_per_second",
)
STOPPED = "stopped"
"""The kind with which ``request_errors_total`` counts requests that the router has ended."""
SAMPLE_SECONDS = 5.0
"""The time between two samples of the counts whose recent growth is published."""
_FAULTS_OF_CLIENTS = (
    ErrorKind.INVALID_REQUEST,
    ErrorKind.NOT_FOUND,
    ErrorKind.UNAUTHENTICATED,
    ErrorKind.PAYLOAD_TOO_LARGE,
    ErrorKind.UNSUPPORTED_MEDIA_TYPE,
    ErrorKind.CANCELLED,
)
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)


class RouterMetrics(Collector):
    """All metrics of one router; a collector for ``serving.metrics.render``."""

    def __init__(self, goals: Goals | None = None) -> None:
        self._registry = CollectorRegistry()
        self.load = LoadMetrics(self._registry)
        self.requests = RequestMetrics(self._registry, goals or Goals())
        self.recent = RecentMetrics(self._registry, self.requests)
        self.batches = BatchMetrics(self._registry)
        self.drains = DrainMetrics(self._registry)
        self.moves = MigrationMetrics(self._registry)
        self.scaling = ScalingMetrics(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield all families, without the times of their creation."""
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


class LoadMetrics:
    """The requests and pools of this moment, and where requests were placed."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._waiting = _gauge(registry, "num_requests_waiting")
        self._running = _gauge(registry, "num_requests_running")
        self._decisions = _tally(registry, "routing_decisions_total")
        self._workers = _gauge(registry, "workers")
        self._restarts = _tally(registry, "worker_restarts_total")
        self._utilization = _gauge(registry, "pool_utilization")
        self._queue = _gauge(registry, "queue_seconds")
        self._pressure = _gauge(registry, "scaling_pressure")
        self._failed_pairs = _gauge(registry, "failed_pairs")

    def set_requests(self, num_waiting: int, num_running: int, decisions: Mapping[str, int]) -> None:
        """Set the gauges of requests. decisions: number of placements by the kinds of their legs."""
        self._waiting.set(num_waiting)
        self._running.set(num_running)
        self._decisions.set(decisions)

    def set_failed_pairs(self, kinds: Tally[ErrorKind]) -> None:
        """Set the gauge of pairs of workers that cannot hand over KV, by the kind of their error."""
        for kind in TRANSFER_KINDS:
            self._failed_pairs.labels(kind.value).set(kinds[kind])

    def set_pools(self, loads: Sequence[PoolLoad], restarts: Mapping[str, int]) -> None:
        """Set the gauges of pools, and the restarts of workers by role.

        A pool that is not among ``loads`` has only numbers of workers, which are 0.
        """
        self._restarts.set(dict.fromkeys((role.value for role in WORKER_ROLES), 0) | dict(restarts))
        # a pool that has lost its last worker shows zeros: without a value alerts would not fire
        states_of = {load.role: load.states for load in loads}
        for role in WORKER_ROLES:
            states = states_of.get(role, Tally())
            for state in ShownState:
                self._workers.labels(role.value, state.value).set(states[state])
        # else a pool without workers would keep the figures that it had before
        for gauge in (self._utilization, self._queue, self._pressure):
            gauge.clear()
        for load in loads:
            if load.utilization is not None:
                self._utilization.labels(load.role.value).set(load.utilization)
            self._queue.labels(load.role.value).set(load.queue_seconds)
            self._pressure.labels(load.role.value).set(load.pressure)


class RecentMetrics:
    """The latency and the goals of the last seconds. Call ``sample`` every ``SAMPLE_SECONDS``."""

    def __init__(self, registry: CollectorRegistry, requests: "RequestMetrics") -> None:
        times = requests.times
        self._attainment = _gauge(registry, "slo_attainment")
        self._ttft_histogram = times.first_token
        self._itl_histogram = times.token_gap
        self._ttft = RecentCounts(times.first_token.counts, _LATENCY_SECONDS)
        self._itl = RecentCounts(times.token_gap.counts, _LATENCY_SECONDS)
        self._goals = RecentCounts(times.goals.counts, _ATTAINMENT_SECONDS)
        self._totals = RecentCounts(requests.totals, _LATENCY_SECONDS)

    def sample(self) -> None:
        """Remember the counts of now, from which later ones are subtracted."""
        for recent in (self._ttft, self._itl, self._goals, self._totals):
            recent.sample()

    def rates(self) -> dict[str, float]:
        """Return the requests, tokens, errors, replays and recomputed prompts per second of the last seconds."""
        return dict(zip(_RATES, self._totals.rates(), strict=True))

    def latency(self) -> RecentLatency:
        """Return the P90 of the last seconds."""
        return RecentLatency(
            self._ttft_histogram.quantile(self._ttft.growth(), 0.9),
            self._itl_histogram.quantile(self._itl.growth(), 0.9),
        )

    def set(self) -> None:
        """Set the gauge of goals."""
        self._attainment.clear()
        for slo, share in attainment(self._goals.growth()).items():
            self._attainment.labels(slo).set(share)


class RequestMetrics:
    """The outcomes, tokens and times of requests.

    first_token: records the seconds from a request's arrival to its first token. token_gap: records the seconds between two
    deliveries of tokens to one request. tokens: counts delivered tokens. Tokens call these three directly. times: the
    latencies. sizes: the tokens of requests. replays: of attempts after the first one.
    """

    def __init__(self, registry: CollectorRegistry, goals: Goals) -> None:
        self.times = Times(registry, goals)
        self.first_token = self.times.first_token.observe
        self.token_gap = self.times.token_gap.observe
        self.sizes = RequestSizes(registry)
        self.tokens = self.sizes.generated.add
        self._success = new_counter(registry, "request_success_total")
        self._errors = new_counter(registry, "request_errors_total")
        self.replays = ReplayMetrics(registry)
        # ``labels`` takes a lock and a search at each call, and nearly all answers end in one of two ways
        self._usual_success = {
            reason: self._success.labels(reason.value) for reason in (FinishReason.STOP, FinishReason.LENGTH)
        }

    def on_success(self, reason: FinishReason, usage: Usage, timings: Timings, tenant: str) -> None:
        """Count a request with a complete answer. tenant: of its API key; empty without one."""
        success = self._usual_success.get(reason) or self._success.labels(reason.value)
        success.inc()
        self.sizes.observe(usage, tenant)
        self.times.observe(timings, usage.num_completion_tokens)

    def on_failure(self, kind: ErrorKind) -> None:
        """Count a request that ended with an error; a client that disconnected counts as cancelled."""
        self._errors.labels(kind.value).inc()
        # the fault of a client is none of the service
        if kind not in _FAULTS_OF_CLIENTS:
            self.times.goals.on_failure()

    def totals(self) -> list[int]:
        """Return the numbers of requests with an answer, tokens, errors, replays, and prompts that were computed again."""
        return [
            sum_of(self._success),
            int(self.sizes.generated.value),
            sum_of(self._errors),
            self.replays.total,
            self.replays.num_recomputed,
        ]

    def on_stop(self, *, is_background: bool) -> None:
        """Count a request that this router has ended, and not its client. is_background: it belongs to a batch."""
        self._errors.labels(STOPPED).inc()
        if not is_background:
            self.times.goals.on_failure()


class Times:
    """The latency split of requests, in seconds. goals: how many requests met their goals."""

    def __init__(self, registry: CollectorRegistry, goals: Goals) -> None:
        self.goals = GoalCounts(registry, goals)
        self.first_token = _histogram(registry, "time_to_first_token_seconds", _LONG)
        self.token_gap = _histogram(registry, "inter_token_latency_seconds", _SHORT)
        self._e2e = _histogram(registry, "e2e_request_latency_seconds", _LONG)
        self._queue = _histogram(registry, "request_queue_time_seconds", _LONG)
        self._prefill = _histogram(registry, "request_prefill_time_seconds", _LONG)
        self._transfer = _histogram(registry, "request_transfer_time_seconds", _SHORT)
        self._decode = _histogram(registry, "request_decode_time_seconds", _LONG)

    def observe(self, timings: Timings, num_tokens: int) -> None:
        """Record the phases of one request, whose answer has this many tokens."""
        first = (queue := timings.queue) + timings.prefill
        end_to_end = timings.end_to_end
        itl = (end_to_end - first) / (num_tokens - 1) if num_tokens > 1 else None
        self.goals.on_answer(first, itl)
        self._e2e.observe(end_to_end)
        self._queue.observe(queue)
        self._prefill.observe(timings.prefill)
        self._transfer.observe(timings.transfer)
        self._decode.observe(timings.first_decode_step + timings.decode)


class RequestSizes:
    """The number of requests, and the tokens of complete ones.

    admitted: counts requests. generated: counts tokens as they are delivered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.admitted = _event_counter(registry, "requests_admitted_total").add
        self.generated = _event_counter(registry, "generation_tokens_total")
        self._prompt_tokens = _event_counter(registry, "prompt_tokens_total")
        self._prompt = _histogram(registry, "request_prompt_tokens", _TOKENS)
        self._uncached = _histogram(registry, "request_uncached_prompt_tokens", _TOKENS)
        self._answer = _histogram(registry, "request_generation_tokens", _TOKENS)
        self._keys = KeyTokens(registry)

    def observe(self, usage: Usage, tenant: str) -> None:
        """Record the tokens of one request. tenant: of its API key; empty without one."""
        num_tokens = usage.num_prompt_tokens
        self._prompt_tokens.add(num_tokens)
        self._prompt.observe(num_tokens)
        self._uncached.observe(num_tokens - usage.num_cached_tokens)
        self._answer.observe(usage.num_completion_tokens)
        self._keys.observe(usage, tenant)


class KeyTokens:
    """The prompt tokens of each API key, and those that a prefix cache had: a client that defeats the cache is seen here."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._labels: dict[str, str] = {"": "none"}
        self._prompt = Tally[str]()
        self._cached = Tally[str]()
        _tally(registry, "key_prompt_tokens_total").set(self._prompt)
        _tally(registry, "key_cached_tokens_total").set(self._cached)

    def observe(self, usage: Usage, tenant: str) -> None:
        """Record the tokens of one request."""
        label = self._labels.get(tenant)
        if label is None:
            # each label is a time series for ever, so a service with many keys counts the rest together
            label = tenant[:_KEY_CHARACTERS] if len(self._labels) <= _MAX_KEYS else "other"
            if label != "other":
                self._labels[tenant] = label
        self._prompt[label] += usage.num_prompt_tokens
        self._cached[label] += usage.num_cached_tokens


class DrainMetrics:
    """The drains of workers, and their changes of roles."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._drains = new_counter(registry, "drains_total")
        self._seconds = _histogram(registry, "drain_seconds", _LONG)
        self._flips = new_counter(registry, "flips_total")

    def on_end(self, result: str, seconds: float) -> None:
        """Count a drain. result: empty, moved, undone or lost."""
        self._drains.labels(result).inc()
        self._seconds.observe(seconds)

    def on_flip(self, role: str) -> None:
        """Count a worker that has taken this role."""
        self._flips.labels(role).inc()


class MigrationMetrics:
    """The moves of answers from one worker to another while they are decoded. recent: the last ones that have succeeded."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._moves = new_counter(registry, "migrations_total")
        self._pause = _histogram(registry, "migration_pause_seconds", _SHORT)
        self.recent = deque[MigrationRecord](maxlen=_NUM_RECENT_MOVES)

    def on_end(self, result: str, reason: str) -> None:
        """Count a move. result: a ``MigrationState``. reason: drain or flip."""
        self._moves.labels(result, reason).inc()

    def note(self, move: MigrationRecord) -> None:
        """Record how long a move that has succeeded interrupted its answer; do nothing for another one."""
        if move.pause_seconds is not None:
            self._pause.observe(move.pause_seconds)
            self.recent.append(move)


class ScalingMetrics:
    """The decisions of the autoscaler."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._desired = _gauge(registry, "desired_workers")
        self._held = _gauge(registry, "scaling_held_workers")
        self._correction = _gauge(registry, "timing_correction")
        self._is_bounded = _gauge(registry, "timing_correction_bounded")
        self._age = _optional_gauge(registry, "scaling_decision_age_seconds")
        self._decisions = new_counter(registry, "scaling_decisions_total")
        self._restarts = _optional_gauge(registry, "autoscaler_restarts")
        self._refusals = new_counter(registry, "autoscaler_lease_refusals_total")

    def on_decision(self, role: Role, decision: PoolScaling) -> None:
        """Count a decision for one pool."""
        self._decisions.labels(role.value, decision.direction.value, decision.reason.value).inc()

    def on_lease_refused(self) -> None:
        """Count a lease that another autoscaler has asked for in vain."""
        self._refusals.inc()

    def set(
        self, pools: Mapping[Role, PoolScaling], age_seconds: float | None, num_restarts: int | None
    ) -> None:
        """Set the gauges. pools: the last decision; empty if it is too old. age_seconds: None if there is none.

        num_restarts: of the autoscaler; None without a decision.
        """
        for gauge in (self._desired, self._held, self._correction, self._is_bounded):
            gauge.clear()
        for role, decision in pools.items():
            self._desired.labels(role.value).set(decision.desired)
            self._correction.labels(role.value).set(decision.correction)
            self._is_bounded.labels(role.value).set(decision.is_correction_bounded)
            for reason in HOLDS:
                held = decision.held if decision.held_by is reason else 0
                self._held.labels(role.value, reason.value).set(held)
        self._age.value = age_seconds
        self._restarts.value = num_restarts


class BatchMetrics:
    """The folder of files, and the results of requests of batches."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._batches = _gauge(registry, "num_batches")
        self._file_bytes = _gauge(registry, "num_file_bytes")
        self._requests = new_counter(registry, "batch_requests_total")

    def count_requests(self, result: str, number: int) -> None:
        """Count requests of batches: completed, failed, expired, retried or stopped."""
        self._requests.labels(result).inc(number)

    def set_files(self, batches: Tally[str], num_bytes: int) -> None:
        """Set the gauges of the folder. batches: number by status."""
        for status in BatchStatus:
            self._batches.labels(status.value).set(batches[status.value])
        self._file_bytes.set(num_bytes)


def _gauge(registry: CollectorRegistry, name: str) -> Gauge:
    metric = ROUTER_METRICS[name]
    return Gauge(PREFIX + name, metric.text, metric.labels, registry=registry)


def _optional_gauge(registry: CollectorRegistry, name: str) -> OptionalGauge:
    return OptionalGauge(registry, PREFIX + name, ROUTER_METRICS[name].text)


def _event_counter(registry: CollectorRegistry, name: str) -> EventCounter:
    return EventCounter(registry, PREFIX + name, ROUTER_METRICS[name].text)


def _histogram(registry: CollectorRegistry, name: str, bounds: tuple[float, ...]) -> EventHistogram:
    return EventHistogram(registry, PREFIX + name, ROUTER_METRICS[name].text, bounds)


def _tally(registry: CollectorRegistry, name: str) -> TallyCounter:
    metric = ROUTER_METRICS[name]
    return TallyCounter(registry, PREFIX + name, metric.text, *metric.labels)
