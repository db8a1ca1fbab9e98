"""The demo of the autoscaler, shortened: real workers on a tiny model, with a timing file that makes them slow on paper."""

import json
import logging
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autoscaler.decision import Order, Verb
from autoscaler.policy import Goals
from autoscaler.timing_model import PrefillTiming, StepTiming, TimingModel, write_timing
from benchmarks.autoscale_demo import run
from benchmarks.autoscale_figures import checks, figures_of, table, turns
from benchmarks.autoscale_load import FIVE_MINUTES, PHASES, Phase, arrivals_of, goals_for, scaled
from benchmarks.autoscale_picture import rate_of
from benchmarks.autoscale_plan import Plan, planned, simulate
from benchmarks.autoscale_run import Recording, Sample
from benchmarks.autoscale_trace import WINDOWS, Window, excerpt, read_trace, write_excerpt
from benchmarks.simulation.changes import busy_seconds
from benchmarks.simulation.load import Arrival
from benchmarks.streams import Stream
from tests.autoscaler.cases import TIMING, D, P
from tests.checkpoints import make_checkpoint

TRACE = [Arrival(0.7 * number, 100 + number, 12) for number in range(100)]
SHORT = Window(0.0, 60.0)
GOALS = Goals(ttft=1.5, itl=0.5)
SLOW = TimingModel(
    prefill=PrefillTiming(base_seconds=0.5, seconds_per_token=0.0),
    decode=(StepTiming(base_seconds=0.01, seconds_per_context_token=0.0, seconds_per_answer=0.001),),
    kv_tokens=10_000,
    max_answers=8,
    start_seconds=120.0,
)
SMALL = TimingModel(
    prefill=PrefillTiming(base_seconds=0.005, seconds_per_token=7e-5, seconds_per_token_squared=7e-8),
    decode=(StepTiming(base_seconds=2e-3, seconds_per_context_token=2e-6, seconds_per_answer=1e-4),),
    kv_tokens=30_000,
    max_answers=8,
    start_seconds=12.0,
)
"""The times of the demo model on one core, roughly."""


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_a_short_demo_grows_and_loses_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "autoscaler.controller")
    write_timing(tmp_path / "timing.json", SLOW)
    phases = [Phase("calm", 3.0, SHORT, 0.5, 0.5), Phase("spike", 12.0, SHORT, 2.0, 2.0)]
    load = arrivals_of(phases, TRACE, SLOW, GOALS, seed=1)
    plan = Plan(
        model=str(make_checkpoint(tmp_path / "model")),
        timing=SLOW,
        timing_file=tmp_path / "timing.json",
        goals=GOALS,
        phases=phases,
        load=load,
        seed=1,
    )
    recording = run(plan)
    assert recording.errors == []
    assert len(recording.answers) == len(load) > 30
    assert recording.most(P) == 2
    assert [one.desired[P] for one in recording.samples][-1] == 2
    assert any(line.startswith("prefill 1→2 ") for _, line in recording.decisions)
    plan.timing_file.unlink()  # a measured one is in a folder that is removed after the run
    figures = json.loads(json.dumps(figures_of(plan, recording)))
    assert figures["timing"]["start_seconds"] == SLOW.start_seconds
    assert (figures["failed"], figures["turns"]) == (0, {"prefill": 0, "decode": 0})
    assert len(figures["start_seconds"]) == 1
    assert figures["checks"]["nothing failed"]
    assert figures["checks"]["turns"]
    assert figures["over_simulated"].keys() == {"worker_hours", "attainment"}
    assert f"| {len(load)}, 0 |" in table(figures)
    assert figures["seconds_from_spike_to_worker"] > 0
    assert figures["simulated"]["scaled"]["requests"] == len(load)
    assert len(figures["samples"]["prefill"]["serving"]) == len(figures["samples"]["time"])


def recorded(*numbers: tuple[float, int, int]) -> Recording:
    """Return a recording with samples of the prefill pool: time, serving and desired workers."""
    samples = [
        Sample(time, {P: serving, D: 1}, {P: desired, D: 1}, {P: serving, D: 1}, 0)
        for time, serving, desired in numbers
    ]
    return Recording(samples=samples)


def test_worker_hours_count_workers_that_start() -> None:
    recording = recorded((0, 1, 1), (10, 1, 2), (20, 2, 2), (30, 2, 1), (40, 1, 1))
    assert recording.worker_hours(P) == pytest.approx((10 + 20 + 20 + 20) / 3600)
    assert recording.worker_hours(P, 25.0) == pytest.approx((10 + 20 + 10) / 3600)
    assert recording.worker_hours(D) == pytest.approx(40 / 3600)
    assert recording.most(P) == 2


def test_the_time_to_the_first_worker_more_counts_from_the_spike() -> None:
    recording = recorded((0, 1, 1), (10, 2, 2), (20, 1, 1), (30, 1, 2), (40, 2, 2))
    assert recording.seconds_to_grow(P, 25.0) == 15.0
    assert recording.seconds_to_grow(P, 12.0) is None
    assert recording.seconds_to_grow(D, 25.0) is None


def test_a_start_lasts_from_the_decision_until_the_worker_serves() -> None:
    recording = recorded((0, 1, 1), (10, 1, 2), (20, 1, 2), (30, 2, 2), (40, 2, 1), (50, 1, 1), (60, 1, 2))
    assert recording.starts() == [20.0]


def test_a_request_without_an_answer_has_missed_its_goals() -> None:
    recording = Recording()
    recording.answers = [
        Stream(sent=0.0, arrivals=[1.0, 1.1], num_tokens=2),
        Stream(sent=0.0, arrivals=[1.6, 1.7], num_tokens=2),
        Stream(sent=0.0, arrivals=[1.0, 1.6], num_tokens=2),
    ]
    recording.errors = ["an error"]
    assert recording.attainment(GOALS) == 0.25


def test_turns_are_changes_of_direction() -> None:
    assert turns([None, 1, 1, 2, 3, 3]) == 0
    assert turns([1, 2, 1, 1, 2, 2, None, 1]) == 3


FASTER = msgspec.structs.replace(
    TIMING, prefill=PrefillTiming(base_seconds=0.0, seconds_per_token=2e-5), max_answers=8
)


@pytest.mark.parametrize("timing", [TIMING, FASTER])
def test_the_load_is_the_share_of_a_worker(timing: TimingModel) -> None:
    """A slow machine gets a part of the requests of a window, and a fast one gets them several times."""
    trace = excerpt()
    goals = goals_for(timing, trace)
    phases = scaled(PHASES, 600.0)
    assert sum(phase.seconds for phase in phases) == pytest.approx(600.0)
    load = arrivals_of(phases, trace, timing, goals, seed=3)
    assert [one.time for one in load] == sorted(one.time for one in load)
    begin = 0.0
    for phase in phases:
        of_phase = [one for one in load if begin <= one.time < begin + phase.seconds]
        begin += phase.seconds
        busy = sum(busy_seconds(phase.pool, one, timing, goals) for one in of_phase) / phase.seconds
        assert busy == pytest.approx((phase.before + phase.after) / 2, rel=0.5)
    num_recorded = sum(len(window.requests_of(trace)) for window in WINDOWS)
    assert (len(load) > 2 * num_recorded) is (timing is FASTER)


def test_the_growing_part_grows() -> None:
    phase = next(phase for phase in PHASES if phase.name == "growing")
    load = arrivals_of([phase], excerpt(), FASTER, goals_for(FASTER, excerpt()), seed=1)
    half = sum(one.time < phase.seconds / 2 for one in load)
    assert len(load) - half == pytest.approx(half * 0.569 / 0.306, rel=0.2)


def test_the_spike_is_four_times_the_load_before_it() -> None:
    names = [phase.name for phase in PHASES]
    spike = PHASES[names.index("spike")]
    assert spike.before == spike.after == pytest.approx(4 * PHASES[names.index("spike") - 1].after)


def test_the_load_of_the_demo_changes_as_its_parts_do(tmp_path: Path) -> None:
    write_timing(tmp_path / "timing.json", SMALL)
    plan = planned(tmp_path / "timing.json", PHASES, model="demo", trace=None, seed=1)
    assert (plan.num_changes(P), plan.num_changes(D)) == (4, 2)


def test_in_the_five_minutes_a_pool_grows_and_a_worker_changes_its_role(tmp_path: Path) -> None:
    write_timing(tmp_path / "timing.json", SMALL)
    plan = planned(tmp_path / "timing.json", FIVE_MINUTES, model="demo", trace=None, seed=1)
    assert plan.seconds == 300
    report = simulate(plan, {P: 1, D: 1})
    orders = [order for one in report.decisions for order in one.orders]
    assert [(order.verb, order.role) for order in orders] == [(Verb.ADD, P), (Verb.FLIP, P)]
    figures = figures_of(plan, recorded((0, 1, 1), (10, 1, 2), (20, 2, 2)))
    assert figures["seconds_from_spike_to_worker"] is None
    assert figures["changes_of_load"] == {"prefill": 2, "decode": 2}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_simulated_demo_meets_its_goals(tmp_path: Path, seed: int) -> None:
    write_timing(tmp_path / "timing.json", SMALL)
    plan = planned(tmp_path / "timing.json", PHASES, model="demo", trace=None, seed=seed)
    report = simulate(plan, {P: 1, D: 1})
    assert report.num_answers == report.num_requests
    assert report.attainment >= 0.95
    assert report.most == {P: 2, D: 2}
    assert report.total_hours <= 0.7 * 4 * plan.seconds / 3600
    assert all(report.num_turns(role) <= 2 * plan.num_changes(role) for role in (P, D))
    orders = [order for one in report.decisions for order in one.orders]
    assert Order(Verb.DRAIN, P) in orders


def test_a_whole_trace_has_the_committed_windows(tmp_path: Path) -> None:
    """Times are rounded to milliseconds, and the trace may begin before its first window."""
    moments = (datetime(2023, 11, 16, 18) + timedelta(seconds=number) for number in range(3000))
    rows = [f"{moment},{number},{number % 7}" for number, moment in enumerate(moments)]
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    whole = read_trace(path)
    write_excerpt(whole, tmp_path / "windows.csv")
    lines = (tmp_path / "windows.csv").read_text().splitlines()
    assert lines[:2] == ["seconds,prompt_tokens,answer_tokens", "1320.0,1320,4"]
    assert len(lines) == 1 + sum(len(window.requests_of(whole)) for window in WINDOWS)
    assert all(window.requests_of(excerpt()) for window in WINDOWS)
    with pytest.raises(ValueError, match="no requests from second 0 to 60"):
        SHORT.requests_of(excerpt())


MET: dict[str, Any] = {
    "failed": 0,
    "requests": 9,
    "answers": 9,
    "attainment": 0.95,
    "share_of_fixed_hours": 0.7,
    "changes_of_load": {"prefill": 2, "decode": 0},
    "turns": {"prefill": 4, "decode": 2},
    "over_simulated": {"worker_hours": 1.15, "attainment": 0.9},
}


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({}, set()),
        ({"failed": 1}, {"nothing failed"}),
        ({"answers": 8}, {"nothing failed"}),
        ({"attainment": 0.949}, {"attainment"}),
        ({"share_of_fixed_hours": 0.701}, {"worker-hours"}),
        ({"share_of_fixed_hours": None}, {"worker-hours"}),
        ({"turns": {"prefill": 5, "decode": 0}}, {"turns"}),
        ({"turns": {"prefill": 0, "decode": 3}}, {"turns"}),
        ({"over_simulated": {"worker_hours": 1.16, "attainment": 1.0}}, {"simulation"}),
        ({"over_simulated": {"worker_hours": 1.0, "attainment": 0.84}}, {"simulation"}),
    ],
)
def test_each_goal_of_the_demo_is_checked(change: dict[str, Any], missed: set[str]) -> None:
    assert {name for name, is_met in checks({**MET, **change}).items() if not is_met} == missed


def test_rates_are_counted_in_tens_of_seconds() -> None:
    assert rate_of([0.0, 1.0, 9.9, 10.0, 29.0], 30.0) == [0.3, 0.1, 0.1, 0.0]
