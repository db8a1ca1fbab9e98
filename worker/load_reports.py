"""Decides when a worker reports its load to a router."""

import time
from collections.abc import Callable

from contract.membership import Load
from engine.scheduling.stats import SchedulerStats

REPORT_SECONDS = 0.5
"""Least time between two reports that differ in averages and totals only, while the engine works."""


class LoadReports:
    """Remembers the last report on one stream. clock: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: Load | None = None
        self._last_at = 0.0

    def next(self, stats: SchedulerStats, *, is_idle: bool = False) -> Load | None:
        """Return the load to report, or None if no report is due.

        A change of what routers decide by is due at once. is_idle: the engine has no work, so that any change is due.
        """
        load = load_of(stats)
        now = self._clock()
        if self._last:
            is_due = is_idle or now - self._last_at >= REPORT_SECONDS or _basis(load) != _basis(self._last)
            if not is_due or load == self._last:
                return None
        self._last = load
        self._last_at = now
        return load


def load_of(stats: SchedulerStats) -> Load:
    """Return the load that an engine's state amounts to."""
    return Load(
        num_running=stats.num_running_reqs,
        num_waiting=stats.num_waiting_reqs,
        kv_cache_usage=stats.kv_cache_usage,
        queued_prompt_tokens=stats.num_queued_prompt_tokens,
        num_free_blocks=stats.num_free_blocks,
        num_leases=stats.num_leases,
        num_fetches=stats.num_fetches,
        prefill_seconds_per_token=stats.prefill_seconds_per_token,
        step_seconds=stats.step_seconds,
        prefix_cache_queries=stats.prefix_cache_stats.queries,
        prefix_cache_hits=stats.prefix_cache_stats.hits,
    )


def _basis(load: Load) -> tuple[int, int, float]:
    """Return what routers decide by."""
    return load.num_running, load.num_waiting, load.kv_cache_usage
