"""The real changes of a load, by which the changes of direction of a pool are counted."""

import msgspec
import pytest

from autoscaler.policy import Goals
from autoscaler.timing_model import StepTiming
from benchmarks.simulation.changes import Level, busy_seconds, load_levels, num_changes, spans
from benchmarks.simulation.load import Arrival, Lengths, arrivals, steps
from tests.autoscaler.cases import GOALS, TIMING, D, P


@pytest.mark.parametrize(
    ("levels", "number"),
    [
        ([], 0),
        ([1.0, 1.0], 0),
        ([1.0, 1.4, 1.0], 0),
        ([1.0, 1.5], 1),
        ([1.0, 1.2, 1.4, 1.6, 1.5, 2.0], 1),
        ([2.0, 1.3], 1),
        ([2.0, 1.0, 1.2, 0.9, 2.0], 2),
        ([0.2, 0.2, 0.8, 0.2, 0.8, 0.25], 4),
        ([0.02, 0.2, 0.02], 0),
        ([3.0, 2.1, 2.9, 2.1], 0),
    ],
)
def test_a_change_is_half_of_the_load_and_a_quarter_of_a_worker(levels: list[float], number: int) -> None:
    found = [Level(level) for level in levels]
    assert num_changes(found) == number
    assert num_changes(found[::-1]) == number


def test_levels_are_the_busy_workers_between_two_times() -> None:
    load = [Arrival(1.0, 600, 100), Arrival(9.0, 600, 100), Arrival(11.0, 600, 1)]
    levels = load_levels(load, [0.0, 10.0, 20.0, 30.0], TIMING, GOALS)
    prompt = TIMING.prefill.seconds(600)
    assert [level.mean for level in levels[P]] == pytest.approx([2 * prompt / 10, prompt / 10, 0.0])
    assert [level.error for level in levels[P]] == pytest.approx([prompt * 2 / 15, prompt / 10, 0.0])
    assert levels[D][0].mean == pytest.approx(2 * busy_seconds(D, load[0], TIMING, GOALS) / 10)
    assert levels[D][0].mean > 50 * levels[D][1].mean > 0.0


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_requests_of_a_constant_rate_are_no_change(seed: int) -> None:
    """Twelve requests in each span: means differ by half of the lower one and by a quarter of a worker."""
    load = arrivals(steps((0, 0.06)), 0.06, 40_000, Lengths(8000, 20), seed)
    levels = load_levels(load, spans(40_000, 200.0), TIMING, GOALS)[P]
    means = [level.mean for level in levels]
    assert num_changes([Level(mean) for mean in means]) > 10
    assert num_changes(levels) == 0


def test_a_span_that_is_not_whole_is_left_out() -> None:
    assert spans(650.0, 200.0) == [0.0, 200.0, 400.0, 600.0]


def test_an_answer_keeps_a_part_of_a_full_decode_worker_busy() -> None:
    """A step may take 20 ms, which is that of ten answers: so each of them takes a tenth of its worker."""
    timing = msgspec.structs.replace(
        TIMING,
        decode=(StepTiming(base_seconds=0.01, seconds_per_context_token=0.0, seconds_per_answer=0.001),),
    )
    goals = Goals(ttft=1.0, itl=0.02)
    assert busy_seconds(D, Arrival(0.0, 600, 100), timing, goals) == pytest.approx(100 * 0.02 / 10)
