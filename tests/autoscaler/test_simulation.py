"""The law over the router's policies and a model of times: the load changes, and the pools follow."""

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from autoscaler.decision import Verb
from autoscaler.policy import Goals, PoolBounds, ScalingPolicy
from autoscaler.timing_model import PrefillTiming, StepTiming
from benchmarks.simulation.load import (
    Arrival,
    Lengths,
    arrivals,
    azure_trace,
    day,
    ramp,
    scaled,
    steps,
)
from benchmarks.simulation.timeline import Timeline
from benchmarks.simulation.worker import SimulatedDecode, SimulatedRequest
from contract.errors import SettingError
from contract.scaling import ScalingReason
from tests.autoscaler.cases import GOALS, POLICY, TIMING, D, P, simulate

LENGTHS = Lengths()
SEEDS = pytest.mark.parametrize("seed", [1, 2, 3])


def mixed(
    first: Lengths, second: Lengths, rate: float, change: float, end: float, seed: int
) -> list[Arrival]:
    """Return requests of one kind up to ``change``, and of another kind from then on."""
    before = arrivals(steps((0, rate)), rate, change, first, seed)
    after = arrivals(steps((0, rate)), rate, end - change, second, seed + 1)
    return before + [Arrival(one.time + change, one.prompt_tokens, one.answer_tokens) for one in after]


@SEEDS
def test_a_constant_load_settles(seed: int) -> None:
    report = simulate(arrivals(steps((0, 3)), 3, 1800, LENGTHS, seed), 1800)
    assert report.num_answers == report.num_requests
    assert report.attainment >= 0.97
    assert all(report.num_turns(role) <= 2 for role in (P, D))
    last = {role: report.desired[role][-1] for role in (P, D)}
    assert all(time < 1200 for time, _ in last.values())


@SEEDS
def test_a_step_and_back_turns_each_pool_at_most_twice_for_each_change(seed: int) -> None:
    report = simulate(arrivals(steps((0, 2), (600, 8), (1500, 2)), 8, 2700, LENGTHS, seed), 2700)
    assert report.num_answers == report.num_requests
    assert report.attainment >= 0.95
    for role in (P, D):
        assert report.num_turns(role) <= 4
        numbers = dict(report.desired[role])
        peak = max(number for time, number in numbers.items() if 600 <= time < 1500)
        assert report.desired[role][-1][1] < peak
    assert report.total_hours <= 0.8 * sum(report.most.values()) * 0.75


@SEEDS
def test_a_ramp_is_followed_without_turning_back(seed: int) -> None:
    report = simulate(arrivals(ramp(300, 1500, 1, 9), 9, 1800, LENGTHS, seed), 1800)
    assert report.attainment >= 0.95
    assert all(report.num_turns(role) <= 2 for role in (P, D))
    assert report.most[P] >= 3


def test_a_spike_is_answered_and_the_pool_shrinks_again() -> None:
    report = simulate(arrivals(steps((0, 2), (600, 8), (780, 2)), 8, 1800, LENGTHS, 4), 1800)
    assert report.num_answers == report.num_requests
    assert report.attainment >= 0.85  # a start takes 20 s, and a settled pool acts on new latencies only
    grown = next(time for time, number in report.desired[P] if time > 600)
    assert grown <= 630
    assert report.desired[P][-1][1] <= 2


def test_a_day_takes_a_part_of_the_hours_of_a_pool_for_its_peak() -> None:
    """A short day of two hours, and workers that are three times as slow, so that there are some."""
    slow = msgspec.structs.replace(
        TIMING,
        prefill=PrefillTiming(base_seconds=0.06, seconds_per_token=1.2e-3),
        decode=(StepTiming(base_seconds=0.036, seconds_per_context_token=1.2e-6, seconds_per_answer=1.8e-3),),
    )
    policy = replace(POLICY, goals=Goals(ttft=4.5, itl=0.12))
    load = arrivals(day(0.1, 5.0, 7200), 5, 7200, LENGTHS, 5)
    report = simulate(load, 7200, policy, truth=slow)
    fixed = simulate(load, 7200, policy, truth=slow, is_fixed=True, initial=report.most)
    assert report.attainment >= 0.95
    assert report.attainment >= fixed.attainment - 0.05
    assert report.total_hours <= 0.7 * fixed.total_hours
    assert all(report.num_turns(role) <= 4 for role in (P, D))


def test_workers_change_their_roles_when_the_kind_of_load_changes() -> None:
    """Long prompts and then long answers, and no device is free: flips follow, and no worker is added."""
    policy = ScalingPolicy(prefill=PoolBounds(most=5), decode=PoolBounds(most=5), goals=GOALS, budget=6)
    load = mixed(Lengths(900, 20), Lengths(60, 500), 5.0, 600.0, 1800.0, 6)
    report = simulate(load, 1800, policy, initial={P: 5, D: 1})
    flips = [order.role for one in report.decisions for order in one.orders if order.verb is Verb.FLIP]
    assert flips.count(P) >= 2
    assert D not in flips
    assert report.num_answers == report.num_requests
    late = [one for one in report.decisions if one.time > 1500]
    assert all(one.pools[D].present >= 3 for one in late)


def test_no_worker_changes_its_role_when_both_pools_grow_together() -> None:
    load = arrivals(steps((0, 1), (300, 7)), 7, 900, LENGTHS, 7)
    report = simulate(load, 900)
    assert not [order for one in report.decisions for order in one.orders if order.verb is Verb.FLIP]
    assert report.most[P] > 1


def test_a_budget_is_never_exceeded() -> None:
    policy = ScalingPolicy(prefill=PoolBounds(most=8), decode=PoolBounds(most=8), goals=GOALS, budget=4)
    report = simulate(arrivals(steps((0, 2), (200, 12)), 12, 700, LENGTHS, 8), 700, policy)
    assert all(sum(pool.desired for pool in one.pools.values()) <= 4 for one in report.decisions)
    assert any(pool.reason is ScalingReason.BUDGET for one in report.decisions for pool in one.pools.values())


def test_a_time_without_metrics_changes_nothing_and_the_law_goes_on_afterwards() -> None:
    load = arrivals(steps((0, 2), (600, 8)), 8, 1200, LENGTHS, 9)
    report = simulate(load, 1200, is_away=lambda now: 590 < now < 800)
    away = [one for one in report.decisions if 590 < one.time < 800]
    assert away
    assert not any(one.orders for one in away)
    assert next(time for time, number in report.desired[P] if time > 600) <= 810
    assert report.num_answers == report.num_requests


def test_a_worker_that_never_becomes_ready_is_replaced() -> None:
    load = arrivals(steps((0, 2), (300, 8)), 8, 900, LENGTHS, 10)
    report = simulate(load, 900, starts=lambda number: None if number in (3, 4) else 20.0)
    forgotten = [one.time for one in report.decisions for order in one.orders if order.verb is Verb.FORGET]
    assert forgotten
    assert report.num_answers == report.num_requests
    assert report.decisions[-1].pools[P].present >= 3


def test_starts_that_take_far_longer_than_the_timing_file_has_are_waited_for() -> None:
    """A start takes 150 s, and the file has 20: after 60 s it would be given up, again and again."""
    load = arrivals(steps((0, 2), (300, 8)), 8, 1800, LENGTHS, 10)
    report = simulate(load, 1800, starts=lambda number: 150.0)
    assert not [order for one in report.decisions for order in one.orders if order.verb is Verb.FORGET]
    told = msgspec.structs.replace(TIMING, start_seconds=150.0)
    control = simulate(load, 1800, believed=told, starts=lambda number: 150.0)
    assert report.attainment >= control.attainment - 0.05
    assert report.attainment > 0.5


def test_a_model_that_is_wrong_by_half_is_corrected_by_what_is_measured() -> None:

    slow = msgspec.structs.replace(
        TIMING,
        decode=(msgspec.structs.replace(TIMING.decode[0], base_seconds=0.018, seconds_per_answer=9e-4),),
        prefill=msgspec.structs.replace(TIMING.prefill, seconds_per_token=6e-4),
    )
    load = arrivals(steps((0, 5)), 5, 1500, LENGTHS, 11)
    wrong = simulate(load, 1500, truth=slow, believed=TIMING)
    right = simulate(load, 1500, truth=slow)
    assert wrong.attainment >= right.attainment - 0.06
    late = [one for one in wrong.decisions if one.time > 1200]
    last = [one for one in right.decisions if one.time > 1200]
    for role in (P, D):
        assert abs(late[-1].pools[role].proposed - last[-1].pools[role].proposed) <= 1


def test_a_simulation_is_the_same_every_time() -> None:
    load = arrivals(steps((0, 2), (100, 6)), 6, 300, LENGTHS, 12)
    one = simulate(load, 300)
    other = simulate(load, 300)
    assert one.as_dict() == other.as_dict()
    assert one.desired == other.desired


def test_answers_of_a_batch_end_in_the_time_of_their_steps() -> None:
    """One answer alone, then two together: the pace of both is that of a batch of two."""
    timeline = Timeline()
    done: list[SimulatedRequest] = []
    paces: list[tuple[float, float]] = []
    decode = SimulatedDecode(timeline, TIMING, done.append, lambda *pace: paces.append(pace))
    first, second = (SimulatedRequest(Arrival(0.0, 100, 101), number, num_left=100.0) for number in (0, 1))
    decode.add(first)
    timeline.at(50 * TIMING.step_seconds(1, 101), lambda: decode.add(second))
    timeline.run_until(100.0)
    assert done == [first, second]
    assert sum(tokens for _, tokens in paces) == pytest.approx(200)
    assert max(pace for pace, _ in paces) == pytest.approx(TIMING.step_seconds(2, 251), rel=0.02)


def test_arrivals_have_the_rate_and_the_lengths() -> None:
    found = arrivals(steps((0, 4), (500, 1)), 4, 1000, Lengths(300, 50), 13)
    assert all(before.time <= after.time for before, after in pairwise(found))
    assert sum(one.time < 500 for one in found) == pytest.approx(2000, rel=0.1)
    assert sum(one.time >= 500 for one in found) == pytest.approx(500, rel=0.2)
    assert sum(one.prompt_tokens for one in found) / len(found) == pytest.approx(300, rel=0.1)
    assert min(one.answer_tokens for one in found) >= 1
    assert day(1.0, 3.0, 100.0)(50.0) == pytest.approx(3.0)
    assert day(1.0, 3.0, 100.0)(100.0) == pytest.approx(1.0)


def test_a_trace_in_the_form_of_azure_is_read_and_scaled(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(
        b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        b"2023-11-16 18:15:50.9951690,1000,10\r\n"
        b"2023-11-16 18:15:46.6805900,4808,0\r\n"
    )
    trace = azure_trace(path)
    assert [(one.prompt_tokens, one.answer_tokens) for one in trace] == [(4808, 1), (1000, 10)]
    assert [one.time for one in trace] == pytest.approx([0.0, 4.314579])
    assert scaled(trace, time=2.0, tokens=0.1)[1] == Arrival(trace[1].time * 2.0, 100, 1)


@pytest.mark.parametrize("content", ["", "TIMESTAMP\n", "TIMESTAMP,ContextTokens,GeneratedTokens\nx,1,1\n"])
def test_what_is_no_trace_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(content)
    with pytest.raises(SettingError, match=r"trace\.csv"):
        azure_trace(path)
    with pytest.raises(SettingError, match="missing"):
        azure_trace(tmp_path / "missing.csv")


def test_lengths_are_drawn_within_six_times_the_mean() -> None:
    random_numbers = random.Random(1)
    drawn = [Lengths(100, 10, least=2).sample(random_numbers) for _ in range(2000)]
    assert max(prompt for prompt, _ in drawn) == 600
    assert min(answer for _, answer in drawn) == 2
