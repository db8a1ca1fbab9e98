"""Reports of a worker's load: at once, at intervals, and from an idle engine."""

from engine.scheduling.stats import PrefixCacheStats, SchedulerStats
from worker.load_reports import REPORT_SECONDS, LoadReports, load_of


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_an_unchanged_load_is_reported_once() -> None:
    reports = LoadReports(Clock())
    stats = SchedulerStats(num_running_reqs=1)
    assert reports.next(stats) == load_of(stats)
    assert reports.next(stats, is_idle=True) is None


def test_averages_alone_are_reported_at_intervals_and_counts_at_once() -> None:
    clock = Clock()
    reports = LoadReports(clock)
    assert reports.next(SchedulerStats(num_running_reqs=1, step_seconds=0.1))
    assert reports.next(SchedulerStats(num_running_reqs=1, step_seconds=0.2)) is None
    for counts in (
        SchedulerStats(num_running_reqs=2),
        SchedulerStats(num_running_reqs=2, num_waiting_reqs=1),
        SchedulerStats(num_running_reqs=2, num_waiting_reqs=1, kv_cache_usage=0.5),
    ):
        assert reports.next(counts) == load_of(counts)
    later = SchedulerStats(num_running_reqs=2, num_waiting_reqs=1, kv_cache_usage=0.5, step_seconds=0.3)
    clock.now += REPORT_SECONDS / 2
    assert reports.next(later) is None
    clock.now += REPORT_SECONDS / 2
    assert reports.next(later) == load_of(later)


def test_an_idle_engine_reports_every_change() -> None:
    reports = LoadReports(Clock())
    assert reports.next(SchedulerStats(num_leases=1))
    last = reports.next(SchedulerStats(num_leases=0), is_idle=True)
    assert last is not None and last.num_leases == 0


def test_a_load_has_every_figure_of_the_engine() -> None:
    stats = SchedulerStats(
        num_running_reqs=1,
        num_waiting_reqs=2,
        kv_cache_usage=0.5,
        num_queued_prompt_tokens=3,
        num_free_blocks=4,
        num_leases=5,
        num_fetches=6,
        prefill_seconds_per_token=0.25,
        step_seconds=0.125,
        prefix_cache_stats=PrefixCacheStats(queries=7, hits=8),
    )
    load = load_of(stats)
    assert (load.num_running, load.num_waiting, load.kv_cache_usage) == (1, 2, 0.5)
    assert (load.queued_prompt_tokens, load.num_free_blocks, load.num_leases, load.num_fetches) == (
        3,
        4,
        5,
        6,
    )
    assert (load.prefill_seconds_per_token, load.step_seconds) == (0.25, 0.125)
    assert (load.prefix_cache_queries, load.prefix_cache_hits) == (7, 8)
