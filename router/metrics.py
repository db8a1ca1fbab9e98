"""What a router counts, under the names of ``serving.metrics``."""

from collections import Counter as Tally
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from contract.errors import ErrorKind
from contract.outputs import FinishReason
from router.answer import Usage
from router.batches.records import BatchStatus
from router.policy import WorkerView
from router.timings import Timings
from serving.metrics import PREFIX, ROUTER_METRICS

_LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)


class RouterMetrics(Collector):
    """The counters of one router; a collector for ``serving.metrics.render``."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._waiting = self._gauge("num_requests_waiting")
        self._running = self._gauge("num_requests_running")
        self._workers = self._gauge("num_workers", "role")
        self._ttft = self._histogram("time_to_first_token_seconds", _LONG)
        self._itl = self._histogram("inter_token_latency_seconds", _SHORT)
        self._e2e = self._histogram("e2e_request_latency_seconds", _LONG)
        self._queue = self._histogram("request_queue_time_seconds", _LONG)
        self._prefill = self._histogram("request_prefill_time_seconds", _LONG)
        self._transfer = self._histogram("request_transfer_time_seconds", _SHORT)
        self._decode = self._histogram("request_decode_time_seconds", _LONG)
        self._prompt_tokens = self._counter("prompt_tokens_total")
        self._generation_tokens = self._counter("generation_tokens_total")
        self._success = self._counter("request_success_total", "finished_reason")
        self._errors = self._counter("request_errors_total", "kind")
        self._replays = self._counter("request_replays_total", "kind")
        self._local = self._counter("request_local_recomputes_total")
        self._batches = self._gauge("num_batches", "status")
        self._file_bytes = self._gauge("num_file_bytes")
        self._batch_requests = self._counter("batch_requests_total", "result")
        for reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._success.labels(reason.value)

    def first_token(self, seconds: float) -> None:
        """Token 0 went out, so long after the arrival."""
        self._ttft.observe(seconds)

    def token_gap(self, seconds: float) -> None:
        """Another arrival of tokens, so long after the last one."""
        self._itl.observe(seconds)

    def tokens(self, count: int) -> None:
        """Tokens were delivered."""
        self._generation_tokens.inc(count)

    def succeeded(self, reason: FinishReason, usage: Usage, timings: Timings) -> None:
        """A request has its whole answer."""
        self._success.labels(reason.value).inc()
        self._prompt_tokens.inc(usage.num_prompt_tokens)
        self._e2e.observe(timings.end_to_end)
        self._queue.observe(timings.queue)
        self._prefill.observe(timings.prefill)
        self._transfer.observe(timings.transfer)
        self._decode.observe(timings.first_decode_step + timings.decode)

    def failed(self, kind: ErrorKind) -> None:
        """A request ended with an error; a client that went away counts as cancelled."""
        self._errors.labels(kind.value).inc()

    def replayed(self, kind: ErrorKind) -> None:
        """An attempt failed like this, and another one follows."""
        self._replays.labels(kind.value).inc()

    def recomputed_locally(self) -> None:
        """A decode worker computes the prompt of a replay itself."""
        self._local.inc()

    def batch_requests(self, result: str, number: int) -> None:
        """Count requests of batches that are completed, failed or expired, or that were retried or stopped to give way."""
        self._batch_requests.labels(result).inc(number)

    def files(self, batches: Tally[str], num_bytes: int) -> None:
        """Set the gauges of the folder of files to this moment. batches: how many there are of each status."""
        for status in BatchStatus:
            self._batches.labels(status.value).set(batches[status.value])
        self._file_bytes.set(num_bytes)

    def now(self, num_waiting: int, num_running: int, workers: Iterable[WorkerView]) -> None:
        """Set the gauges to this moment."""
        self._waiting.set(num_waiting)
        self._running.set(num_running)
        by_role = Tally(worker.role.value for worker in workers)
        for role in ("prefill", "decode", "both"):
            self._workers.labels(role).set(by_role[role])

    def collect(self) -> Iterator[Metric]:
        """All families, without the instants of their creation."""
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family

    def _gauge(self, name: str, *labels: str) -> Gauge:
        return Gauge(PREFIX + name, ROUTER_METRICS[name], labels, registry=self._registry)

    def _counter(self, name: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, ROUTER_METRICS[name], labels, registry=self._registry)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, ROUTER_METRICS[name], registry=self._registry, buckets=buckets)
