"""The figures of the moves in a run: the pauses that they cost, and what these may be."""

import asyncio
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from math import inf, isfinite
from statistics import median

import aiohttp

from tests.chaos.pool.pool import Pool

_RESULTS = re.compile(r'^kvbaton_migrations_total\{result="(\w+)"\} ([\d.]+)$', re.M)
_SAMPLE_SECONDS = 1.0
_MIN_BOUND_SECONDS = 0.05
_STEPS = 3


class StepLengths:
    """Samples how long the workers' steps take that continue answers."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def sample(self, pool: Pool) -> None:
        """Take samples until the task is cancelled."""
        while True:
            with suppress(aiohttp.ClientError, ConnectionError):  # the router is killed just now
                workers = (await pool.facts())["workers"]
                self.seconds += [w["step_seconds"] for w in workers if w["num_running"] and w["step_seconds"]]
            await asyncio.sleep(_SAMPLE_SECONDS)  # the interval between samples


def results_of_moves(metrics: Sequence[str]) -> Counter[str]:
    """Return the number of moves by result. metrics: /metrics of the routers."""
    found: Counter[str] = Counter()
    for text in metrics:
        for result, number in _RESULTS.findall(text):
            found[result] += int(float(number))
    return found


def pauses_of_moves(metrics: Sequence[str], steps: Sequence[float]) -> dict[str, float]:
    """Return quantiles of the moves' pauses, and the bound of the 99th percentile; empty without a move.

    The bound is three median steps, at least 50 ms, and the 99th percentile of the time that transfers take.
    """
    pauses = bucket_quantiles(metrics, "kvbaton_migration_pause_seconds")
    if not pauses or not steps:
        return pauses
    step = median(steps)
    transfer = bucket_quantiles(metrics, "kvbaton_request_transfer_time_seconds").get("p99_at_most", 0.0)
    bound = max(_STEPS * step, _MIN_BOUND_SECONDS) + transfer
    return {**pauses, "step": round(step, 4), "transfer_p99_at_most": transfer, "bound": round(bound, 4)}


def bucket_quantiles(metrics: Sequence[str], histogram: str) -> dict[str, float]:
    """Return the count, and the upper bounds of the buckets of the median and the 99th percentile; empty without a value.

    A bound that is infinite is left out.

    metrics: /metrics of several processes.
    """
    line = re.compile(rf'^{histogram}_bucket\{{le="([^"]+)"\}} ([\d.]+)$', re.M)
    totals: Counter[float] = Counter()
    for text in metrics:
        for bound, number in line.findall(text):
            totals[float(bound)] += int(float(number))
    count_of_all = totals[inf]
    if not count_of_all:
        return {}
    bounds = {
        name: next(bound for bound in sorted(totals) if totals[bound] >= share * count_of_all)
        for name, share in (("p50_at_most", 0.5), ("p99_at_most", 0.99))
    }
    return {"count": count_of_all, **{name: bound for name, bound in bounds.items() if isfinite(bound)}}
