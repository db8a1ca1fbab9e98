"""A service without a timing file: the law begins with a guess, and the readings of what is served replace it."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaler.demand import Corrections
from autoscaler.signals import PoolSignals
from autoscaler.timing_model import TimingModel, default_timing, with_sizes
from benchmarks.simulation.load import Lengths, arrivals, steps
from benchmarks.simulation.report import Report
from tests.autoscaler.cases import QUIET, TIMING, D, P, simulate

LENGTHS = Lengths()
WRONG = pytest.mark.parametrize("factor", [0.2, 0.5, 2.0, 5.0])


def guess(factor: float) -> TimingModel:
    """Return a guess whose times are ``factor`` times the true ones."""
    step = TIMING.decode[0]
    prefill = TIMING.prefill
    return msgspec.structs.replace(
        TIMING,
        origin="default",
        prefill=msgspec.structs.replace(
            prefill,
            base_seconds=factor * prefill.base_seconds,
            seconds_per_token=factor * prefill.seconds_per_token,
            seconds_per_token_squared=factor * prefill.seconds_per_token_squared,
        ),
        decode=(
            msgspec.structs.replace(
                step,
                base_seconds=factor * step.base_seconds,
                seconds_per_context_token=factor * step.seconds_per_context_token,
                seconds_per_answer=factor * step.seconds_per_answer,
            ),
        ),
        kv_tokens=1000,
        max_answers=2,
    )


LOAD = arrivals(steps((0, 2), (300, 8)), 8, 1200, LENGTHS, 3)


@pytest.fixture(scope="module")
def right() -> Report:
    """A run with the measured model."""
    return simulate(LOAD, 1200)


@WRONG
def test_a_guess_that_is_wrong_leads_to_the_pools_of_a_measured_model(factor: float, right: Report) -> None:
    guessed = simulate(LOAD, 1200, believed=guess(factor))
    assert guessed.num_answers == guessed.num_requests
    assert guessed.attainment >= right.attainment - 0.05
    for role in (P, D):
        numbers = [report.decisions[-1].pools[role].proposed for report in (guessed, right)]
        assert abs(numbers[0] - numbers[1]) <= 1, numbers


@WRONG
def test_load_from_the_first_moment_is_answered_by_the_second_decision(factor: float) -> None:
    report = simulate(arrivals(steps((0, 12)), 12, 120, LENGTHS, 5), 120, believed=guess(factor))
    orders = [one.time for one in report.decisions if one.orders]
    assert orders[0] <= 10.0
    assert report.decisions[2].pools[P].desired >= 4


@given(st.floats(0.05, 20.0), st.floats(0.05, 20.0))
def test_the_first_reading_replaces_the_guess_and_later_ones_its_mean(prefill: float, step: float) -> None:
    """A reading in which everything took twice as long, as at the warm-up, is forgotten."""
    timing = guess(1.0)
    load = replace(
        QUIET,
        uncached_prompt_tokens_p90=600.0,
        step_seconds=step * TIMING.step_seconds(8, 8 * 660.0),
        prefill_seconds_per_token=prefill * TIMING.prefill.seconds(600.0) / 600.0,
    )
    slow = replace(
        load,
        step_seconds=2 * (load.step_seconds or 0),
        prefill_seconds_per_token=2 * (load.prefill_seconds_per_token or 0),
    )
    first = Corrections().with_reading(timing, load, 8.0)
    assert first.prefill == pytest.approx(prefill)
    assert first.step == pytest.approx(step)
    corrections = Corrections().with_reading(timing, slow, 8.0)
    for _ in range(60):
        corrections = corrections.with_reading(timing, load, 8.0)
    assert corrections.prefill == pytest.approx(prefill, rel=0.02)
    assert corrections.step == pytest.approx(step, rel=0.02)


def test_a_guess_grows_with_the_model_and_a_gpu_is_faster() -> None:
    models = [default_timing(size, has_gpu=gpu) for gpu in (False, True) for size in (0, 10**9, 10**11)]
    for model in models:
        model.check()
        assert model.is_guess
    for small, large in ((0, 1), (1, 2), (3, 4), (4, 5)):
        assert models[small].prefill.seconds(600) < models[large].prefill.seconds(600)
        assert models[small].step_seconds(8, 8 * 660) < models[large].step_seconds(8, 8 * 660)
        assert models[small].start_seconds < models[large].start_seconds
    assert models[5].prefill.seconds(600) < 0.1 * models[2].prefill.seconds(600)


def test_a_guess_has_the_sizes_that_workers_report_and_a_measured_model_its_own() -> None:
    pool = PoolSignals(num_ready=2, max_in_flight=128, max_tokens=40_000)
    sized = with_sizes(guess(1.0), pool)
    assert (sized.max_answers, sized.kv_tokens) == (64, 20_000)
    assert with_sizes(guess(1.0), PoolSignals()) == guess(1.0)
    assert with_sizes(TIMING, pool) == TIMING
