"""Decides when a worker reports its load to a router."""

import time
from collections.abc import Callable

from contract.membership import Load
from engine.scheduling.stats import SchedulerStats
from serving.gpu_memory import GpuMemory

REPORT_SECONDS = 0.5
"""Least time between two reports that differ in averages and totals only, while the engine works."""


class LoadReports:
    """Remembers the last report on each stream, by its session.

    gpu_memory: the last reading of the memory of the worker's GPUs. clock: seconds, monotonic.
    """

    def __init__(
        self,
        gpu_memory: Callable[[], GpuMemory | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gpu_memory = gpu_memory
        self._clock = clock
        self._last: dict[str, tuple[Load, float]] = {}

    def forget(self, session: str) -> None:
        """Remove what was sent on a stream that has ended."""
        self._last.pop(session, None)

    def next(self, session: str, stats: SchedulerStats, *, is_idle: bool = False) -> Load | None:
        """Return the load to report on this stream, or None if no report is due.

        A change of what routers decide by is due at once. is_idle: the engine has no work, so that any change is due.
        """
        load = load_of(stats, self._gpu_memory())
        now = self._clock()
        if session in self._last:
            last, sent_at = self._last[session]
            is_due = is_idle or now - sent_at >= REPORT_SECONDS or _basis(load) != _basis(last)
            if not is_due or load == last:
                return None
        self._last[session] = load, now
        return load


def load_of(stats: SchedulerStats, gpu_memory: GpuMemory | None = None) -> Load:
    """Return the load that an engine's state amounts to, beside the memory of its GPUs."""
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
        gpu_used_bytes=gpu_memory.num_used_bytes if gpu_memory else None,
        gpu_bytes=gpu_memory.num_bytes if gpu_memory else None,
    )


def _basis(load: Load) -> tuple[int, int, float]:
    """Return what routers decide by."""
    return load.num_running, load.num_waiting, load.kv_cache_usage
