"""The metrics of a router. Names and help texts are in ``serving.metrics``; to add a metric, begin there."""

from collections import Counter as Tally
from collections import deque
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from contract.errors import ErrorKind
from contract.outputs import FinishReason
from router.answer import Usage
from router.batches.records import BatchStatus
from router.move_record import MoveRecord
from router.timings import Timings
from router.views import WorkerView
from serving.event_metrics import EventCounter, EventHistogram
from serving.metrics import PREFIX, ROUTER_METRICS

_LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_NUM_RECENT_MOVES = 256
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)


class RouterMetrics(Collector):
    """All metrics of one router; a collector for ``serving.metrics.render``."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.load = LoadMetrics(self._registry)
        self.requests = RequestMetrics(self._registry)
        self.batches = BatchMetrics(self._registry)
        self.drains = DrainMetrics(self._registry)
        self.moves = MoveMetrics(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield all families, without the times of their creation."""
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


class LoadMetrics:
    """The requests and workers of this moment."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._waiting = _gauge(registry, "num_requests_waiting")
        self._running = _gauge(registry, "num_requests_running")
        self._workers = _gauge(registry, "num_workers", "role")

    def set(self, num_waiting: int, num_running: int, workers: Iterable[WorkerView]) -> None:
        """Set all gauges."""
        self._waiting.set(num_waiting)
        self._running.set(num_running)
        by_role = Tally(worker.role.value for worker in workers)
        for role in ("prefill", "decode", "both"):
            self._workers.labels(role).set(by_role[role])


class RequestMetrics:
    """The outcomes, tokens and times of requests.

    first_token: records the seconds from a request's arrival to its first token. token_gap: records the seconds between two
    deliveries of tokens to one request. tokens: counts delivered tokens. Tokens call these three directly.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._times = _Times(registry)
        self.first_token = self._times.first_token.observe
        self.token_gap = self._times.token_gap.observe
        self._prompt_tokens = _event_counter(registry, "prompt_tokens_total")
        self.tokens = _event_counter(registry, "generation_tokens_total").add
        self._success = _counter(registry, "request_success_total", "finished_reason")
        self._errors = _counter(registry, "request_errors_total", "kind")
        self._replays = _counter(registry, "request_replays_total", "kind")
        self._local = _counter(registry, "request_local_recomputes_total")
        self._usual_success = {
            reason: self._success.labels(reason.value) for reason in (FinishReason.STOP, FinishReason.LENGTH)
        }

    def succeeded(self, reason: FinishReason, usage: Usage, timings: Timings) -> None:
        """Count a request with a complete answer."""
        success = self._usual_success.get(reason) or self._success.labels(reason.value)
        success.inc()
        self._prompt_tokens.add(usage.num_prompt_tokens)
        self._times.observe(timings)

    def failed(self, kind: ErrorKind) -> None:
        """Count a request that ended with an error; a client that disconnected counts as cancelled."""
        self._errors.labels(kind.value).inc()

    def replayed(self, kind: ErrorKind) -> None:
        """Count a failed attempt that another one follows."""
        self._replays.labels(kind.value).inc()

    def recomputed_locally(self) -> None:
        """Count a replay whose prompt the decode worker computes itself."""
        self._local.inc()


class _Times:
    """The latency split of requests, in seconds."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.first_token = _histogram(registry, "time_to_first_token_seconds", _LONG)
        self.token_gap = _histogram(registry, "inter_token_latency_seconds", _SHORT)
        self._e2e = _histogram(registry, "e2e_request_latency_seconds", _LONG)
        self._queue = _histogram(registry, "request_queue_time_seconds", _LONG)
        self._prefill = _histogram(registry, "request_prefill_time_seconds", _LONG)
        self._transfer = _histogram(registry, "request_transfer_time_seconds", _SHORT)
        self._decode = _histogram(registry, "request_decode_time_seconds", _LONG)

    def observe(self, timings: Timings) -> None:
        """Record the phases of one request."""
        self._e2e.observe(timings.end_to_end)
        self._queue.observe(timings.queue)
        self._prefill.observe(timings.prefill)
        self._transfer.observe(timings.transfer)
        self._decode.observe(timings.first_decode_step + timings.decode)


class DrainMetrics:
    """The drains of workers, and their changes of roles."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._drains = _counter(registry, "drains_total", "result")
        self._seconds = _histogram(registry, "drain_seconds", _LONG)
        self._flips = _counter(registry, "flips_total", "role")

    def ended(self, result: str, seconds: float) -> None:
        """Count a drain. result: empty, moved, undone or lost."""
        self._drains.labels(result).inc()
        self._seconds.observe(seconds)

    def flipped(self, role: str) -> None:
        """Count a worker that has taken this role."""
        self._flips.labels(role).inc()


class MoveMetrics:
    """The moves of answers from one worker to another while they are decoded. recent: the last ones that have succeeded."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._moves = _counter(registry, "migrations_total", "result")
        self._pause = _histogram(registry, "migration_pause_seconds", _SHORT)
        self.recent = deque[MoveRecord](maxlen=_NUM_RECENT_MOVES)

    def ended(self, result: str) -> None:
        """Count a move. result: a ``MoveResult``."""
        self._moves.labels(result).inc()

    def note(self, move: MoveRecord) -> None:
        """Record how long a move that has succeeded interrupted its answer; do nothing for another one."""
        if move.pause_seconds is not None:
            self._pause.observe(move.pause_seconds)
            self.recent.append(move)


class BatchMetrics:
    """The folder of files, and the results of requests of batches."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._batches = _gauge(registry, "num_batches", "status")
        self._file_bytes = _gauge(registry, "num_file_bytes")
        self._requests = _counter(registry, "batch_requests_total", "result")

    def count_requests(self, result: str, number: int) -> None:
        """Count requests of batches: completed, failed, expired, retried or stopped."""
        self._requests.labels(result).inc(number)

    def set_files(self, batches: Tally[str], num_bytes: int) -> None:
        """Set the gauges of the folder. batches: number by status."""
        for status in BatchStatus:
            self._batches.labels(status.value).set(batches[status.value])
        self._file_bytes.set(num_bytes)


def _gauge(registry: CollectorRegistry, name: str, *labels: str) -> Gauge:
    return Gauge(PREFIX + name, ROUTER_METRICS[name], labels, registry=registry)


def _counter(registry: CollectorRegistry, name: str, *labels: str) -> Counter:
    return Counter(PREFIX + name, ROUTER_METRICS[name], labels, registry=registry)


def _event_counter(registry: CollectorRegistry, name: str) -> EventCounter:
    return EventCounter(registry, PREFIX + name, ROUTER_METRICS[name])


def _histogram(registry: CollectorRegistry, name: str, bounds: tuple[float, ...]) -> EventHistogram:
    return EventHistogram(registry, PREFIX + name, ROUTER_METRICS[name], bounds)
