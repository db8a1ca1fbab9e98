"""All routers of a service, by their admin APIs, as one: their workers, and the load that their counts show.

``parse_counts`` reads the metrics of one router, and ``CountHistory`` keeps them for some minutes and makes signals of their
growth; both are pure. ``Routers`` fetches what they read, and sends orders and decisions.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from autoscaler.groups import Facts, by_launcher
from autoscaler.pools import WorkerFigures, check_facts, figures
from autoscaler.signals import (
    ENOUGH_REQUESTS,
    LATENCY_SECONDS,
    LENGTH_SECONDS,
    RATE_SECONDS,
    RECENT_SECONDS,
    LoadSignals,
)
from contract.errors import KvbatonError
from contract.scaling import ScalingReport
from launch.router_admin import RouterAdmin, merged, order_first

_PREFIX = "kvbaton_"
_FORGOTTEN_SECONDS = 3600.0
"""The time after which a router that does not answer is taken for one that is gone."""
_MOST = 1e15
"""More than a router counts in years."""
_UNCACHED = "request_uncached_prompt_tokens"
_SUMS = (
    "prompt_tokens_total",
    f"{_UNCACHED}_sum",
    f"{_UNCACHED}_count",
    "generation_tokens_total",
    "request_success_total",
    "request_errors_total",
    "num_requests_waiting",
    "num_requests_running",
)
_HISTOGRAMS = ("time_to_first_token_seconds", "inter_token_latency_seconds", _UNCACHED)


@dataclass(frozen=True)
class RouterCounts:
    """The counts of one router at one time. buckets: by histogram and upper bound. queue_seconds: its longest queue."""

    sums: Mapping[str, float]
    buckets: Mapping[str, Mapping[float, float]]
    queue_seconds: float = 0.0


def parse_counts(text: str) -> RouterCounts:
    """Read the metrics of a router.

    Raises ValueError for a text that is none of Prometheus', and for a count that is negative or not finite.
    """
    sums = dict.fromkeys(_SUMS, 0.0)
    buckets: dict[str, dict[float, float]] = {name: {} for name in _HISTOGRAMS}
    queue_seconds = 0.0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix(_PREFIX)
            histogram = name.removesuffix("_bucket")
            is_read = name in sums or name == "queue_seconds" or histogram in buckets
            # NaN fails both comparisons: one such count would make every later sum NaN.
            if is_read and not 0.0 <= sample.value <= _MOST:
                raise ValueError(f"{sample.name} is {sample.value}")
            if name in sums:
                sums[name] += sample.value
            elif histogram in buckets and "le" in sample.labels:
                buckets[histogram][float(sample.labels["le"])] = sample.value
            elif name == "queue_seconds":
                queue_seconds = max(queue_seconds, sample.value)
    return RouterCounts(sums, buckets, queue_seconds)


@dataclass(frozen=True)
class _Span:
    """The counts of one router at two times, from ``begin`` on."""

    begin: float
    before: RouterCounts
    after: RouterCounts

    def growth(self, name: str) -> float:
        """Return how much a counter has grown."""
        return _growth(self.before, self.after, name)

    def num_arrived(self) -> float:
        """Return the requests that have ended, and those that are held more than before."""
        return num_arrived(self.before, self.after)


def num_arrived(before: RouterCounts, after: RouterCounts) -> float:
    """Return the requests that have ended between two readings of a router, and those that it holds more than before."""
    held = ("num_requests_waiting", "num_requests_running")
    ended = ("request_success_total", "request_errors_total")
    more = sum(after.sums[name] - before.sums[name] for name in held)
    return more + sum(_growth(before, after, name) for name in ended)


def _growth(before: RouterCounts, after: RouterCounts, name: str) -> float:
    """Return how much a counter has grown; one of a router that was started again has grown from 0 on."""
    value = after.sums[name]
    former = before.sums[name]
    return value - former if value >= former else value


@dataclass
class CountHistory:
    """Owns the counts of the last minutes, by router.

    A router counts from its first reading here on, because its counts may be those of days. One that has not answered
    for a while counts from the last reading before that. One that does not answer now counts by what was read.
    """

    _readings: dict[str, deque[tuple[float, RouterCounts]]] = field(default_factory=dict)
    _now: float = 0.0
    _last: Mapping[str, RouterCounts] = field(default_factory=dict)

    def add(self, now: float, routers: Mapping[str, RouterCounts]) -> None:
        """Add the counts of the routers that have answered. Times never decrease."""
        self._now = now
        self._last = routers
        for router, counts in routers.items():
            self._readings.setdefault(router, deque()).append((now, counts))
        for router, readings in list(self._readings.items()):
            # One reading from before the window stays: the growth since then is that of the whole window.
            while len(readings) > 1 and readings[1][0] < now - LENGTH_SECONDS:
                readings.popleft()
            if readings[-1][0] < now - _FORGOTTEN_SECONDS:
                del self._readings[router]

    def load(self, figures: WorkerFigures) -> LoadSignals | None:
        """Return the load; None before a router has answered twice, and if none has answered the last reading."""
        recent = self._spans(RATE_SECONDS)
        if not self._last or not recent:
            return None
        # The requests that show the lengths: those of the last minute, if enough have ended in it.
        spans = self._spans(RECENT_SECONDS)
        if sum(span.growth(f"{_UNCACHED}_count") for span in spans) < ENOUGH_REQUESTS:
            spans = self._spans(LENGTH_SECONDS)
        sums = {name: sum(span.growth(name) for span in spans) for name in _SUMS}
        num_done = sums["request_success_total"]
        num_measured = sums[f"{_UNCACHED}_count"]
        num_waiting = sum(counts.sums["num_requests_waiting"] for counts in self._last.values())
        # A router counts a request as waiting until its first token, also while a prefill worker computes its prompt.
        num_unbound = max(0, round(num_waiting) - figures.num_prefill_legs)
        latencies = self._spans(LATENCY_SECONDS)
        return LoadSignals(
            arrival_rate=max(0.0, sum(span.num_arrived() / (self._now - span.begin) for span in recent)),
            prompt_tokens=sums["prompt_tokens_total"] / num_done if num_done else 0.0,
            uncached_prompt_tokens=sums[f"{_UNCACHED}_sum"] / num_measured if num_measured else 0.0,
            uncached_prompt_tokens_p90=_p90(spans, _UNCACHED) or 0.0,
            answer_tokens=sums["generation_tokens_total"] / num_done if num_done else 0.0,
            ttft_p90=_p90(latencies, "time_to_first_token_seconds"),
            itl_p90=_p90(latencies, "inter_token_latency_seconds"),
            queue_seconds=max(counts.queue_seconds for counts in self._last.values()) if num_unbound else 0.0,
            num_waiting=num_unbound,
            step_seconds=figures.step_seconds,
            prefill_seconds_per_token=figures.prefill_seconds_per_token,
        )

    def _spans(self, seconds: float) -> list[_Span]:
        """Return each router's counts from its first reading of the last ``seconds`` to its last one.

        If there is none in the first half of that time, the one before is the first: what has piled up while a router did
        not answer is not the load of the moment after it. A router without two readings is left out.
        """
        found = []
        for readings in self._readings.values():
            num_before = sum(time < self._now - seconds for time, _ in readings)
            recent = list(readings)[num_before:]
            if recent and num_before and recent[0][0] > self._now - seconds / 2:
                recent = list(readings)[num_before - 1 :]
            if len(recent) > 1:
                found.append(_Span(recent[0][0], recent[0][1], recent[-1][1]))
        return found


def _p90(spans: Iterable[_Span], histogram: str) -> float | None:
    """Return the 90th percentile of what was counted, interpolated within its bucket; None without samples."""
    grown: dict[float, float] = {}
    for span in spans:
        former = span.before.buckets[histogram]
        for bound, number in span.after.buckets[histogram].items():
            earlier = former.get(bound, 0.0)
            # A router that was started again counts from 0.
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
            if bound == float("inf"):  # all that is known of these samples is that they exceed the last bound
                return low
            return low + (bound - low) * ((rank - below) / (number - below) if number > below else 1.0)
        low = bound
        below = number
    return low


logger = logging.getLogger(__name__)
_Reading = tuple[str, Sequence[Facts], RouterCounts]
"""The address of a router, its list of workers, and its counts."""

Admins = Callable[[], Awaitable[Sequence[RouterAdmin]]]
"""Returns the admin APIs of the routers that there are now."""


class Routers:
    """Owns what the routers have reported: their counts of the last minutes, and the last list of workers.

    A data-parallel group is one worker here; orders, which reach all of its ranks, name one of them.

    num_restarts: of the autoscaler, which the routers publish.
    """

    def __init__(self, admins: Admins, num_restarts: int = 0) -> None:
        self._admins = admins
        self._num_restarts = num_restarts
        self._history = CountHistory()
        self._answering: frozenset[str] = frozenset()
        self._listed: dict[str, Facts] = {}
        self.workers: dict[str, Facts] = {}
        """Facts by worker id, of a group by its name; those of before while no router answers."""

    async def read(self, now: float) -> bool:
        """Read all routers; an error of one is logged. Returns False if none answers. now: never decreases."""
        read = [one for one in await asyncio.gather(*map(_read, await self._admins())) if one is not None]
        # Without an answer the last list stays: by an empty one, drained workers would be removed before they are empty.
        if read:
            self._listed = dict(merged(workers for _, workers, _ in read))
            self.workers = by_launcher(self._listed.values())
        self._history.add(now, {address: counts for address, _, counts in read})
        self._answering = frozenset(address for address, _, _ in read)
        return bool(read)

    def load(self) -> LoadSignals | None:
        """Return the load; None before the second reading, and if no router has answered the last one."""
        return self._history.load(figures(self._listed))

    async def order(self, worker: str, verb: str, **query: str) -> None:
        """Send an order through the first router that answers. Raises the last error if none does.

        A router that has not answered the last reading is tried last: a frozen one answers after a long wait.
        """
        routers = sorted(await self._admins(), key=lambda router: router.address not in self._answering)
        rank = self.workers.get(worker, {}).get("first_rank", worker)
        self._listed[rank] = await order_first(routers, rank, verb, **query)
        self.workers = by_launcher(self._listed.values())

    async def report(self, report: ScalingReport) -> None:
        """Send a decision to all routers that have answered. Another one publishes how old its last decision is."""
        report = structs.replace(report, num_restarts=self._num_restarts)
        answering = [router for router in await self._admins() if router.address in self._answering]
        sent = (router.report_scaling(report) for router in answering)
        for error in await asyncio.gather(*sent, return_exceptions=True):
            if isinstance(error, KvbatonError):
                logger.debug("a router does not publish the decision: %s", error.message)
            elif error is not None:
                raise error

    def state_of(self, worker: str) -> Any:
        """Return the state of a worker; None if it is not attached."""
        return self.workers[worker]["state"] if worker in self.workers else None


async def _read(router: RouterAdmin) -> _Reading | None:
    """Read one router; log an error, also a number out of its range, and return None then."""
    try:
        workers = (await router.pool())["workers"]
        check_facts(workers)
        return router.address, workers, parse_counts(await router.metrics())
    except (KvbatonError, ValueError) as error:
        logger.warning("router %s is not read: %s", router.address, error)
        return None
