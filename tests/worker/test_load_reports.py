"""Reports of a worker's load: at once, at intervals, and from an idle engine."""

from engine.scheduling.stats import PrefixCacheStats, SchedulerStats
from serving.gpu_memory import GpuMemory, GpuMemoryReader
from tests.clock import Clock
from worker.router_sessions import REPORT_SECONDS, LoadReports, load_of


def test_an_unchanged_load_is_reported_once() -> None:
    reports = LoadReports(clock=Clock())
    stats = SchedulerStats(num_running_reqs=1)
    assert reports.next("s", stats) == load_of(stats)
    assert reports.next("s", stats, is_idle=True) is None


def test_averages_alone_are_reported_at_intervals_and_counts_at_once() -> None:
    clock = Clock()
    reports = LoadReports(clock=clock)
    assert reports.next("s", SchedulerStats(num_running_reqs=1, step_seconds=0.1))
    assert reports.next("s", SchedulerStats(num_running_reqs=1, step_seconds=0.2)) is None
    for counts in (
        SchedulerStats(num_running_reqs=2),
        SchedulerStats(num_running_reqs=2, num_waiting_reqs=1),
        SchedulerStats(num_running_reqs=2, num_waiting_reqs=1, kv_cache_usage=0.5),
    ):
        assert reports.next("s", counts) == load_of(counts)
    later = SchedulerStats(num_running_reqs=2, num_waiting_reqs=1, kv_cache_usage=0.5, step_seconds=0.3)
    clock.now += REPORT_SECONDS / 2
    assert reports.next("s", later) is None
    clock.now += REPORT_SECONDS / 2
    assert reports.next("s", later) == load_of(later)


def test_each_stream_has_its_own_reports_and_a_new_one_begins_anew() -> None:
    reports = LoadReports(clock=Clock())
    stats = SchedulerStats(num_running_reqs=1)
    for session in ("one", "other"):
        assert reports.next(session, stats)
        assert reports.next(session, stats) is None
    reports.forget("one")
    assert reports.next("one", stats)
    assert reports.next("other", stats) is None


def test_the_memory_of_gpus_is_in_each_report() -> None:
    gpus = GpuMemoryReader(())
    gpus.memory = GpuMemory(10, 100)
    reports = LoadReports(gpus, Clock())
    first = reports.next("s", SchedulerStats())
    gpus.memory = GpuMemory(20, 100)
    assert reports.next("s", SchedulerStats()) is None
    second = reports.next("s", SchedulerStats(), is_idle=True)
    assert first and second and (first.gpu_used_bytes, second.gpu_used_bytes) == (10, 20)


def test_an_idle_engine_reports_every_change() -> None:
    reports = LoadReports(clock=Clock())
    assert reports.next("s", SchedulerStats(num_leases=1))
    last = reports.next("s", SchedulerStats(num_leases=0), is_idle=True)
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
    load = load_of(stats, GpuMemory(9, 10))
    assert (load.gpu_used_bytes, load.gpu_bytes) == (9, 10)
    assert (load.num_running, load.num_waiting, load.kv_cache_usage) == (1, 2, 0.5)
    assert (load.queued_prompt_tokens, load.num_free_blocks, load.num_leases, load.num_fetches) == (
        3,
        4,
        5,
        6,
    )
    assert (load.prefill_seconds_per_token, load.step_seconds) == (0.25, 0.125)
    assert (load.prefix_cache_queries, load.prefix_cache_hits) == (7, 8)
