"""Feed-forward: workers by the forecast and the timing model."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaler.demand import (
    Corrections,
    demand,
    largest_batch,
    mean_context,
    prefill_workers,
    squared_variation,
)
from autoscaler.forecast import Expected, Forecast
from autoscaler.policy import Goals
from tests.autoscaler.cases import GOALS, QUIET, TIMING

NO_CORRECTION = Corrections()
RATES = st.floats(0.01, 50.0)


@given(RATES, st.floats(1.01, 3.0))
def test_more_load_never_needs_fewer_workers(rate: float, factor: float) -> None:
    less = demand(TIMING, GOALS, QUIET, Expected(rate), NO_CORRECTION)
    more = demand(TIMING, GOALS, QUIET, Expected(rate * factor), NO_CORRECTION)
    assert more.decode >= less.decode
    assert more.prefill >= less.prefill


@given(RATES, st.floats(0.5, 10.0), st.floats(1.01, 3.0))
def test_a_longer_goal_never_needs_more_workers(rate: float, ttft: float, factor: float) -> None:
    short = demand(TIMING, Goals(ttft=ttft, itl=0.02), QUIET, Expected(rate), NO_CORRECTION)
    long = demand(TIMING, Goals(ttft=ttft * factor, itl=0.02 * factor), QUIET, Expected(rate), NO_CORRECTION)
    assert long.prefill <= short.prefill + 1e-9
    assert long.decode <= short.decode + 1e-9


@given(st.floats(0.1, 30.0), st.floats(0.05, 2.0), st.floats(0.0, 4.0), st.floats(0.0, 20.0))
def test_a_prefill_worker_is_used_between_three_and_nine_tenths(
    offered: float, service: float, variation: float, patience: float
) -> None:
    number = math.ceil(prefill_workers(offered, service, variation, patience))
    assert offered / number <= 0.9 + 1e-9
    assert offered > 0.3 * (number - 1) - 1e-9


def test_several_workers_may_be_used_more_than_one() -> None:
    one = 0.5 / prefill_workers(0.5, 0.3, 1.0, 1.0)
    assert 4.0 / prefill_workers(4.0, 0.3, 1.0, 1.0) > 1.2 * one


def test_the_batch_is_the_largest_within_goal_memory_and_limit() -> None:
    batch = largest_batch(TIMING, 0.04, 660.0)
    assert TIMING.step_seconds(batch, batch * 660.0) <= 0.04
    assert TIMING.step_seconds(batch + 1, (batch + 1) * 660.0) > 0.04
    assert largest_batch(TIMING, 9.9, 660.0) == TIMING.max_answers
    assert largest_batch(TIMING, 9.9, 6000.0) == 9
    assert largest_batch(TIMING, 0.001, 660.0) == 1


def test_a_goal_that_no_number_of_workers_meets_is_replaced() -> None:
    """Otherwise every pool would grow to its bound and miss the goal all the same."""
    impossible = demand(TIMING, Goals(ttft=0.01, itl=0.001), QUIET, Expected(2.0), NO_CORRECTION)
    assert impossible.goals.ttft == pytest.approx(2 * TIMING.prefill.seconds(1300))
    assert impossible.goals.itl == pytest.approx(1.25 * TIMING.step_seconds(1, 660))
    assert impossible.prefill < 4


@pytest.mark.parametrize(("observed", "factor"), [(1.0, 1.0), (1.5, 1.5), (0.1, 0.5), (9.0, 2.0)])
def test_corrections_approach_what_is_measured_between_half_and_twice(observed: float, factor: float) -> None:
    load = replace(
        QUIET,
        uncached_prompt_tokens_p90=600.0,
        step_seconds=observed * TIMING.step_seconds(8, 8 * 660.0),
        prefill_seconds_per_token=observed * TIMING.prefill.seconds(600.0) / 600.0,
    )
    corrections = NO_CORRECTION
    for _ in range(100):
        corrections = corrections.with_reading(TIMING, load, 8.0)
    assert corrections.prefill == pytest.approx(factor, rel=0.01)
    assert corrections.step == pytest.approx(factor, rel=0.01)
    assert NO_CORRECTION.with_reading(TIMING, QUIET, 8.0) == NO_CORRECTION


@pytest.mark.parametrize("factor", [0.0, 1e-6, 0.09, 11.0, 1e9])
def test_a_time_that_no_worker_has_changes_nothing(factor: float) -> None:
    """A4: a reading far from the model's time is a fault of the worker that reports it."""
    predicted = TIMING.prefill.seconds(QUIET.uncached_prompt_tokens, squared_variation(QUIET))
    load = replace(
        QUIET,
        step_seconds=factor * TIMING.step_seconds(8, 8 * mean_context(QUIET)),
        prefill_seconds_per_token=factor * predicted / QUIET.uncached_prompt_tokens,
    )
    assert NO_CORRECTION.with_reading(TIMING, load, 8.0) == NO_CORRECTION


def observed_forecast(rates: list[float], start: float = 0.0) -> tuple[Forecast, float]:
    forecast = Forecast()
    time = start
    for rate in rates:
        time += 5.0
        forecast = forecast.with_reading(time, rate)
    return forecast, time


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=40), st.floats(0.0, 300.0))
def test_a_forecast_is_between_nothing_and_twice_the_greatest_rate(
    rates: list[float], horizon: float
) -> None:
    forecast, now = observed_forecast(rates)
    assert 0.0 <= forecast.at(now, horizon).rate <= 2.0 * max(rates) + 1e-9


def test_a_constant_rate_is_expected_to_stay() -> None:
    forecast, now = observed_forecast([4.0] * 60)
    assert forecast.at(now, 120.0).rate == pytest.approx(4.0)


def test_a_rising_rate_is_expected_to_rise_and_a_falling_one_not_at_once() -> None:
    rising, now = observed_forecast([0.1 * each for each in range(60)])
    assert rising.at(now, 60.0).rate > 6.0
    falling, now = observed_forecast([6.0 - 0.1 * each for each in range(60)])
    assert falling.at(now, 60.0).rate >= 0.1


def test_a_trend_counts_only_if_it_is_no_chance() -> None:
    """Four requests in a reading of 20 s and then eight, or a hundred times as many."""
    few, now = observed_forecast([0.2] * 20 + [0.25, 0.3, 0.35, 0.4])
    many, _ = observed_forecast([20.0] * 20 + [25.0, 30.0, 35.0, 40.0])
    assert few.at(now, 20.0).rate == pytest.approx(sum([0.2] * 8 + [0.25, 0.3, 0.35, 0.4]) / 12)
    assert many.at(now, 20.0).rate > 30.0


def test_the_noise_of_a_rate_is_two_deviations_of_random_requests() -> None:
    for rate, noise in ((0.05, 1.0), (16 / 75, 0.5), (400 / 75, 0.1)):
        forecast, now = observed_forecast([rate] * 60)
        assert forecast.at(now, 20.0).noise == pytest.approx(noise)
    assert Expected(0.2, 0.5).with_backlog(0.3) == Expected(0.5, 0.2)
    assert Expected(0.0).with_backlog(0.0) == Expected(0.0)


def test_the_rate_of_yesterday_is_expected_again_and_that_of_the_day_before_is_not() -> None:
    forecast = Forecast()
    for number in range(2 * 288 + 140):
        noon = 140 <= number < 146
        forecast = forecast.with_reading(number * 300.0, 9.0 if noon else 1.0)
    now = (2 * 288 + 139) * 300.0
    assert forecast.at(now, 0.0).rate == pytest.approx(1.0, abs=0.01)
    assert forecast.at(now, 300.0).rate == pytest.approx(1.0, abs=0.01)  # yesterday there was no noon
    first, _ = observed_forecast([])
    for number in range(288 + 140):
        first = first.with_reading(number * 300.0, 9.0 if 140 <= number < 146 else 1.0)
    assert first.at((288 + 139) * 300.0, 300.0).rate == pytest.approx(9.0)
    assert len(forecast.days) <= 433
