"""The decisions of the law as routers publish them: the desired number, and what holds a pool."""

from dataclasses import replace

import pytest

from autoscaler.decision import Decision, PoolDecision
from autoscaler.policy import PoolBounds
from contract.scaling import HOLDS, Direction, PoolScaling, ScalingReason
from tests.autoscaler.cases import POLICY, QUIET, Law, P, ready

BUSY = replace(QUIET, arrival_rate=30.0)


def prefill(decision: Decision) -> PoolScaling:
    return decision.report(POLICY).prefill


def test_a_pool_that_is_right_holds_nothing() -> None:
    (decision,) = Law().run(ready(1, 0.3), ready(1, 2.0))
    steady = PoolScaling(desired=1, direction=Direction.NONE, reason=ScalingReason.STEADY)
    assert prefill(decision) == decision.report(POLICY).decode == steady


def test_a_pool_that_grows_to_what_it_needs_holds_nothing() -> None:
    (decision,) = Law().run(ready(1), ready(2), replace(QUIET, arrival_rate=8.0))
    report = prefill(decision)
    assert (report.direction, report.reason, report.held) == (Direction.UP, ScalingReason.FORECAST, 0)
    assert report.desired == decision.pools[P].desired > 1
    assert report.held_by is None


@pytest.mark.parametrize("at_most", [True, False])
def test_bounds_hold_what_is_above_them(at_most: bool) -> None:
    decode = PoolBounds(least=8, most=8)  # so none of its workers changes its role
    law = Law(replace(POLICY, prefill=PoolBounds(most=3), decode=decode))
    report = prefill(law.run(ready(3 if at_most else 2), ready(8), BUSY)[-1])
    law = Law(replace(POLICY, prefill=PoolBounds(most=99), decode=decode))
    free = prefill(law.run(ready(2), ready(8), BUSY)[-1])
    assert report.direction is (Direction.NONE if at_most else Direction.UP)
    assert report.desired == 3
    assert (report.held_by, report.reason) == (ScalingReason.BOUNDS, ScalingReason.BOUNDS)
    assert report.desired + report.held == free.desired
    assert free.held == 0


def test_the_least_number_holds_nothing_of_an_idle_pool() -> None:
    idle = replace(QUIET, arrival_rate=0.0)
    report = prefill(Law().run(ready(1), ready(1), idle)[-1])
    assert (report.desired, report.held, report.held_by) == (1, 0, None)


def test_an_idle_pool_on_its_way_to_the_least_number_is_not_held_by_its_bounds() -> None:
    """Three workers of at most four, and at least one: the pool waits, and then loses one after the other."""
    idle = replace(QUIET, arrival_rate=0.0, ttft_p90=None, itl_p90=None)
    law = Law()
    reports = [prefill(one) for one in law.run(ready(3), ready(1), idle, seconds=600)]
    assert {report.reason for report in reports} == {ScalingReason.STABILIZING, ScalingReason.IDLE}
    assert ScalingReason.BOUNDS not in {report.held_by for report in reports}
    assert reports[0].least == 1


def test_the_budget_holds_what_it_has_no_device_for() -> None:
    law = Law(replace(POLICY, budget=4))
    report = prefill(law.run(ready(2), ready(2), BUSY)[-1])
    assert (report.desired, report.held_by) == (2, ScalingReason.BUDGET)
    assert report.held > 0


def test_a_change_that_is_not_complete_holds_the_next_one() -> None:
    starting = replace(ready(1, 9.0), starting_ages=(4.0,))
    report = prefill(Law().run(starting, ready(8), BUSY)[-1])
    assert (report.desired, report.held_by) == (2, ScalingReason.IN_FLIGHT)
    assert report.held > 0


def test_a_pool_with_spare_workers_waits_and_then_loses_one_at_a_time() -> None:
    law = Law()
    waiting = prefill(law.run(ready(4, 0.3), ready(1, 2.0), seconds=180)[-1])
    assert (waiting.desired, waiting.held) == (4, -3)
    assert waiting.held_by is ScalingReason.STABILIZING
    removing = prefill(law.run(ready(4, 0.3), ready(1, 2.0))[-1])
    assert (removing.direction, removing.desired) == (Direction.DOWN, 3)
    assert (removing.held, removing.held_by) == (-2, ScalingReason.STABILIZING)


def test_a_worker_that_is_given_up_and_not_needed_is_no_direction() -> None:
    waiting = replace(ready(1, 0.3), starting_ages=(60.1,))
    report = prefill(Law().run(waiting, ready(1, 2.0))[-1])
    assert (report.desired, report.direction) == (1, Direction.NONE)
    assert report.reason is ScalingReason.FORGOTTEN


def test_without_signals_the_number_stays_and_the_reason_says_so() -> None:
    report = prefill(Law().run(ready(3), ready(1), None)[-1])
    assert (report.desired, report.direction) == (3, Direction.NONE)
    assert report.reason is ScalingReason.NO_SIGNALS


@pytest.mark.parametrize("reason", list(ScalingReason))
def test_what_is_held_always_has_a_reason_of_holding(reason: ScalingReason) -> None:
    for desired, needed in ((2, 5), (2, 0), (1, 2), (2, 2)):
        pool = PoolDecision(present=2, desired=desired, proposed=2, needed=needed, reason=reason)
        report = pool.report()
        assert (report.held_by in HOLDS) is bool(report.held)
        assert report.desired + report.held == needed
