"""The moving means of a worker's latencies."""

import pytest

from router.workers.attached_worker import MovingMean, WorkerLatency
from tests.clock import Clock


def test_a_mean_is_unknown_before_the_first_sample_and_when_the_last_one_is_old() -> None:
    clock = Clock()
    mean = MovingMean(clock)
    values = [mean.value]
    mean.add(4.0)
    for seconds in (59, 2):
        clock.now += seconds
        values.append(mean.value)
    assert values == [None, 4.0, None]
    mean.add(8.0)
    assert mean.value == pytest.approx(8.0, rel=0.01)


def test_new_samples_count_more_and_weights_count() -> None:
    clock = Clock()
    mean = MovingMean(clock)
    mean.add(1.0, 3)
    mean.add(5.0)
    assert mean.value == pytest.approx(2.0)
    clock.now += 30
    mean.add(10.0)
    assert mean.value is not None and 8.0 < mean.value < 10.0


def test_the_time_in_which_nothing_ran_is_no_gap_between_tokens() -> None:
    clock = Clock()
    latency = WorkerLatency(clock)
    clock.now += 50
    latency.note_step(num_entries=1, num_running_before=0)
    assert latency.token_gap.value is None
    clock.now += 0.25
    latency.note_step(num_entries=3, num_running_before=1)
    assert latency.token_gap.value == pytest.approx(0.25)
    clock.now += 20
    latency.note_step(num_entries=0, num_running_before=1)
    assert latency.token_gap.value == pytest.approx(0.25)
