"""A pool changes its direction at most twice for each real change of the load, however random the requests of a day are."""

from dataclasses import replace

import pytest

from autoscaler.memory import MOST_REGRETS
from autoscaler.policy import Goals
from benchmarks.simulation.changes import load_levels, num_changes, spans
from benchmarks.simulation.load import Lengths, Rate, arrivals, day, steps
from tests.autoscaler.cases import POLICY, TIMING, D, P, simulate

LENGTHS = Lengths(1200, 120)
LONG = replace(POLICY, goals=Goals(ttft=4.0, itl=0.06))
SECONDS = 14_400.0
MOST_RATE = 4.0
SPAN = TIMING.start_seconds + POLICY.damping.stabilization
DAYS: dict[str, Rate] = {
    "few requests": steps((0, 0.15)),
    "some requests": steps((0, 0.6)),
    "quiet, then busy": steps((0, 0.5), (7200, 4.0)),
    "busy, then quiet": steps((0, 4.0), (7200, 0.5)),
    "a busy hour": steps((0, 1.0), (5400, 4.0), (9000, 1.0)),
    "a curve": day(0.2, 4.0, SECONDS),
}
"""Days of four hours. Their prompts take 0.5 s in the mean, and some of them 4 s."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", DAYS)
def test_a_day_turns_each_pool_at_most_twice_for_each_real_change(name: str, seed: int) -> None:
    """And twice for each of the two removals after which a number of workers waits longest: the law learns by them."""
    load = arrivals(DAYS[name], MOST_RATE, SECONDS, LENGTHS, seed)
    report = simulate(load, SECONDS, LONG)
    levels = load_levels(load, spans(SECONDS, SPAN), TIMING, LONG.goals)
    assert report.num_answers == report.num_requests
    assert report.attainment >= 0.98
    for role in (P, D):
        assert report.num_turns(role) <= 2 * (num_changes(levels[role]) + MOST_REGRETS)
    if report.most[P] > 2:
        assert report.total_hours <= 0.8 * sum(report.most.values()) * SECONDS / 3600
