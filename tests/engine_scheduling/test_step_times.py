"""Moving averages of steps, and what a scheduler counts for its router."""

import pytest

from engine.outputs import SchedulerOutput
from engine.scheduling.stats import StepTimes
from tests.engine_scheduling.stepping import RECEIVE, SEND, SteppedEngine, fake_request


def step(*num_tokens: int) -> SchedulerOutput:
    by_key = {str(number): tokens for number, tokens in enumerate(num_tokens)}
    return SchedulerOutput(num_scheduled_tokens=by_key, total_num_scheduled_tokens=sum(num_tokens))


def test_steps_with_prompts_and_steps_of_answers_are_averaged_apart() -> None:
    times = StepTimes()
    assert (times.seconds, times.prefill_seconds_per_token) == (None, None)
    times.note(step(), 9.0)
    assert (times.seconds, times.prefill_seconds_per_token) == (None, None)
    times.note(step(1, 1, 1), 0.2)
    assert (times.seconds, times.prefill_seconds_per_token) == (0.2, None)
    times.note(step(1, 99), 0.5)
    assert times.seconds == 0.2
    assert times.prefill_seconds_per_token == pytest.approx(0.005)


def test_the_averages_follow_a_change_and_long_prompts_weigh_more() -> None:
    times = StepTimes()
    for _ in range(100):
        times.note(step(1), 1.0)
        times.note(step(10), 1.0)
    for _ in range(100):
        times.note(step(1), 2.0)
        times.note(step(10), 1.0)
        times.note(step(90), 1.0)
    assert times.seconds == pytest.approx(2.0, rel=0.01)
    assert times.prefill_seconds_per_token == pytest.approx(2 / 100, rel=0.05)


def test_queued_tokens_are_those_of_prompts_that_are_not_computed() -> None:
    engine = SteppedEngine(max_num_batched_tokens=8, max_num_seqs=2)
    for name in "abc":
        engine.add(fake_request(name, list(range(1, 13)), max_tokens=4))
    queued = []
    for _ in range(20):
        queued.append(engine.scheduler.make_stats().num_queued_prompt_tokens)
        engine.step()
    assert queued[0] == 36
    assert queued == sorted(queued, reverse=True)
    assert queued[1] == 28
    assert queued[-1] == 0


def test_leases_and_fetches_are_counted() -> None:
    engine = SteppedEngine()
    assert engine.scheduler.make_stats().num_free_blocks == engine.pool.num_usable_blocks
    engine.add(fake_request("p", list(range(1, 14)), transfer=SEND))
    engine.run()
    stats = engine.scheduler.make_stats()
    assert (stats.num_leases, stats.num_fetches) == (1, 0)
    assert 0 < stats.num_free_blocks < engine.pool.num_usable_blocks
    engine.add(fake_request("d", list(range(1, 14)), transfer=RECEIVE))
    assert engine.scheduler.make_stats().num_fetches == 1
