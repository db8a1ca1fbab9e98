"""The law: what single situations lead to."""

from dataclasses import replace
from typing import Any

import pytest

from autoscaler.decision import Order, Reason, Verb
from autoscaler.law import decide
from autoscaler.memory import Memory
from autoscaler.policy import Damping, Goals, PoolBounds, ScalingPolicy
from autoscaler.signals import LoadSignals, PoolSignals
from contract.errors import SettingError
from tests.autoscaler.cases import GOALS, POLICY, QUIET, TIMING, D, Law, P, ready, signals

SLOW_FIRST = replace(QUIET, ttft_p90=4.0, queue_seconds=3.0, num_waiting=9)
SLOW_STEPS = replace(QUIET, itl_p90=0.08)
IDLE = LoadSignals(arrival_rate=0.0)


def orders(law: Law, prefill: PoolSignals, decode: PoolSignals, load: LoadSignals = QUIET) -> set[Order]:
    return set(law.run(prefill, decode, load)[-1].orders)


def test_a_load_that_the_pools_serve_changes_nothing() -> None:
    assert not any(one.orders for one in Law().run(ready(1, 0.3), ready(1, 2.0), seconds=600))


def test_a_rate_that_needs_more_workers_adds_them_at_once() -> None:
    (decision,) = Law().run(ready(1), ready(1), replace(QUIET, arrival_rate=8.0))
    assert {(order.verb, order.role) for order in decision.orders} == {(Verb.ADD, P), (Verb.ADD, D)}
    assert decision.pools[P].reason is Reason.FORECAST


def test_a_missed_goal_of_a_busy_pool_adds_workers_to_it_alone() -> None:
    law = Law()
    law.run(ready(1, 3.0), ready(1, 2.0), seconds=30)
    assert {order.role for order in orders(law, ready(1, 3.0), ready(1, 2.0), SLOW_FIRST)} == {P}
    law = Law()
    law.run(ready(1, 0.3), ready(1, 40.0), seconds=60)
    decision = law.run(ready(1, 0.3), ready(1, 40.0), SLOW_STEPS)[-1]
    assert [(order.verb, order.role) for order in decision.orders] == [(Verb.ADD, D)]
    assert decision.pools[D].reason is Reason.LATENCY


def test_a_slow_pool_without_load_needs_no_worker() -> None:
    law = Law()
    assert not any(one.orders for one in law.run(ready(1, 0.1), ready(1, 1.0), SLOW_STEPS, seconds=120))


def test_a_high_reading_must_be_confirmed_and_a_missed_goal_need_not() -> None:
    high = replace(QUIET, itl_p90=0.036)
    law = Law()
    law.run(ready(1, 0.3), ready(1, 40.0), seconds=60)
    first, second = law.run(ready(1, 0.3), ready(1, 40.0), high, seconds=10)
    assert not first.orders
    assert [order.verb for order in second.orders] == [Verb.ADD]


def test_latencies_of_before_a_change_are_not_acted_on_again() -> None:
    """Else a pool that has just grown would grow once more for the same slow requests."""
    law = Law()
    law.run(ready(1, 0.3), ready(1, 40.0), seconds=60)
    assert law.run(ready(1, 0.3), ready(1, 40.0), SLOW_STEPS)[-1].orders
    assert not any(one.orders for one in law.run(ready(1, 0.3), ready(3, 80.0), SLOW_STEPS, seconds=45))
    assert any(one.orders for one in law.run(ready(1, 0.3), ready(3, 80.0), SLOW_STEPS, seconds=10))


def test_a_pool_shrinks_by_one_to_what_has_sufficed() -> None:
    decisions = Law().run(ready(4, 0.3), ready(1, 2.0), seconds=180)
    assert not any(one.orders for one in decisions)
    law = Law()
    law.run(ready(4, 0.3), ready(1, 2.0), seconds=180)
    assert orders(law, ready(4, 0.3), ready(1, 2.0)) == {Order(Verb.DRAIN, P)}
    after = law.run(ready(3, 0.3), ready(1, 2.0), seconds=60)
    assert [bool(one.orders) for one in after] == [False] * 11 + [True]


def test_one_moment_of_load_keeps_a_pool_for_the_whole_stabilization() -> None:
    law = Law()
    law.run(ready(3, 0.3), ready(1, 2.0), seconds=120)
    (moment,) = law.run(ready(3, 0.3), ready(1, 2.0), replace(QUIET, arrival_rate=22.0))
    assert moment.pools[P].proposed == 3
    quiet = law.run(ready(3, 0.3), ready(1, 2.0), seconds=170)
    assert not any(order.role is P for one in quiet for order in one.orders)
    later = law.run(ready(3, 0.3), ready(1, 2.0), seconds=100)
    assert any(Order(Verb.DRAIN, P) in one.orders for one in later)


def test_a_removal_that_is_taken_back_makes_the_next_one_wait_twice_as_long() -> None:
    law = Law()
    law.run(ready(2, 0.3), ready(1, 2.0), seconds=180)
    assert orders(law, ready(2, 0.3), ready(1, 2.0)) == {Order(Verb.DRAIN, P)}
    law.run(ready(1, 3.0), ready(1, 2.0), seconds=60)
    assert {order.verb for order in orders(law, ready(1, 3.0), ready(1, 2.0), SLOW_FIRST)} == {Verb.ADD}
    decisions = law.run(ready(2, 0.3), ready(1, 2.0), seconds=600)
    removed = next(one.time for one in decisions if one.orders)
    assert removed - decisions[0].time >= 2 * 180.0 - 10.0


def test_signals_that_are_away_hold_everything_and_begin_the_waits_anew() -> None:
    law = Law()
    law.run(ready(4, 0.3), ready(1, 2.0), seconds=175)
    away = law.run(ready(4, 0.3), ready(1, 2.0), None, seconds=60)
    assert not any(one.orders for one in away)
    assert {pool.reason for pool in away[-1].pools.values()} == {Reason.NO_SIGNALS}
    assert "held" in away[-1].line
    back = law.run(ready(4, 0.3), ready(1, 2.0), seconds=180)
    assert not any(one.orders for one in back)
    assert orders(law, ready(4, 0.3), ready(1, 2.0)) == {Order(Verb.DRAIN, P)}


def test_a_pool_whose_latency_is_not_known_does_not_shrink_by_latency() -> None:
    law = Law()
    unknown = replace(QUIET, ttft_p90=None, itl_p90=None)
    decisions = law.run(ready(4, 0.3), ready(4, 2.0), unknown, seconds=600)
    assert not any(one.orders for one in decisions)


def test_workers_that_start_count_and_nothing_else_changes_meanwhile() -> None:
    law = Law()
    starting = replace(ready(1, 9.0), starting_ages=(4.0, 4.0))
    (decision,) = law.run(starting, ready(1, 2.0), replace(QUIET, arrival_rate=8.0))
    assert decision.pools[P].present == 3
    assert not [order for order in decision.orders if order.role is P]
    (decision,) = law.run(starting, ready(1, 2.0), replace(QUIET, arrival_rate=30.0))
    assert decision.pools[P].reason is Reason.IN_FLIGHT


def test_a_worker_that_starts_for_three_times_the_median_is_given_up_and_replaced() -> None:
    load = replace(QUIET, arrival_rate=4.0)
    waiting = replace(ready(1), starting_ages=(60.0,))
    (decision,) = Law().run(waiting, ready(1), load)
    assert not [order for order in decision.orders if order.verb is Verb.FORGET]
    (decision,) = Law().run(replace(waiting, starting_ages=(60.1,)), ready(1), load)
    assert decision.pools[P].present == 1
    assert [order.verb for order in decision.orders if order.role is P] == [Verb.FORGET, Verb.ADD]
    measured = replace(signals(5.0, waiting, ready(1), load), start_seconds=10.0)
    decision, _ = decide(POLICY, TIMING, Memory(), measured)
    assert Order(Verb.FORGET, P) in decision.orders


def test_a_pool_that_needs_more_keeps_workers_that_drain_before_it_adds_any() -> None:
    draining = replace(ready(1), num_draining=1)
    (decision,) = Law().run(draining, ready(1), replace(QUIET, arrival_rate=8.0))
    assert [order for order in decision.orders if order.role is P] == [Order(Verb.KEEP, P)]


def test_a_user_who_adds_workers_is_respected_for_the_stabilization() -> None:
    law = Law()
    law.run(ready(1, 0.3), ready(1, 2.0), seconds=600)
    edited = law.run(ready(3, 0.3), ready(1, 2.0), seconds=180)
    assert not any(one.orders for one in edited)
    assert orders(law, ready(3, 0.3), ready(1, 2.0)) == {Order(Verb.DRAIN, P)}


def test_a_user_who_leaves_the_bounds_is_corrected_at_once() -> None:
    law = Law(replace(POLICY, prefill=PoolBounds(least=2, most=3)))
    (decision,) = law.run(ready(5, 0.3), ready(1, 2.0))
    assert decision.orders == (Order(Verb.DRAIN, P),)
    assert decision.pools[P].reason is Reason.BOUNDS
    law = Law(replace(POLICY, prefill=PoolBounds(least=2, most=3)))
    assert orders(law, ready(1, 0.3), ready(1, 2.0)) == {Order(Verb.ADD, P)}


def test_half_of_a_scale_up_that_failed_is_ordered_again_and_not_more() -> None:
    law = Law()
    load = replace(QUIET, arrival_rate=8.0)
    (first,) = law.run(ready(1), ready(2), load)
    missing = sum(order.number for order in first.orders if order.role is P)
    assert missing >= 2
    started = replace(ready(1), starting_ages=(4.0,))
    (second,) = law.run(started, ready(2), load)
    assert not [order for order in second.orders if order.role is P]
    (third,) = law.run(ready(2), ready(2), load)
    assert sum(order.number for order in third.orders if order.role is P) == missing - 1


def test_a_restarted_law_adds_nothing_twice() -> None:
    """The list of the launcher is all that it needs about the orders before."""
    load = replace(QUIET, arrival_rate=8.0)
    (first,) = Law().run(ready(1), ready(2), load)
    added = sum(order.number for order in first.orders if order.role is P)
    starting = replace(ready(1), starting_ages=(1.0,) * added)
    (again,) = Law().run(starting, ready(2), load)
    assert not [order for order in again.orders if order.role is P]


def test_an_idle_pool_shrinks_to_its_bound_and_wakes_when_a_request_waits() -> None:
    law = Law(replace(POLICY, prefill=PoolBounds(least=0, most=4), decode=PoolBounds(least=0, most=4)))
    law.run(ready(1), ready(1), IDLE, seconds=180)
    assert orders(law, ready(1), ready(1), IDLE) == {Order(Verb.DRAIN, P), Order(Verb.DRAIN, D)}
    law.run(ready(0), ready(0), IDLE, seconds=60)
    (decision,) = law.run(ready(0), ready(0), replace(IDLE, num_waiting=1))
    assert set(decision.orders) == {Order(Verb.ADD, P), Order(Verb.ADD, D)}
    assert decision.pools[P].reason is Reason.WAKE


SHARED = ScalingPolicy(prefill=PoolBounds(most=6), decode=PoolBounds(most=6), goals=GOALS, budget=6)


def test_a_flip_that_the_source_can_spare_goes_before_an_addition() -> None:
    law = Law(SHARED)
    busy = replace(QUIET, arrival_rate=2.0, answer_tokens=600.0)
    first, second = law.run(ready(3, 0.3), ready(1, 20.0), busy, seconds=10)
    assert not first.orders
    assert second.orders == (Order(Verb.FLIP, P),)
    assert (second.pools[P].desired, second.pools[D].desired) == (2, 2)
    assert "a flip leaves prefill at" in second.line


def test_no_flip_where_both_pools_need_their_workers() -> None:
    law = Law(replace(SHARED, budget=None))
    busy = replace(QUIET, arrival_rate=5.0, answer_tokens=400.0)
    decisions = law.run(ready(2, 2.0), ready(2, 60.0), busy, seconds=10)
    assert not [order for one in decisions for order in one.orders if order.verb is Verb.FLIP]
    assert [order for one in decisions for order in one.orders if order.verb is Verb.ADD]


def test_opposite_flips_are_half_a_minute_apart() -> None:
    law = Law(SHARED)
    law.run(ready(3, 0.3), ready(1, 20.0), replace(QUIET, arrival_rate=2.0, answer_tokens=600.0), seconds=10)
    prompts = replace(QUIET, arrival_rate=6.0, answer_tokens=2.0)
    back = law.run(ready(1, 3.0), ready(4, 1.0), prompts, seconds=60)
    flipped = [one.time - 10.0 for one in back if Order(Verb.FLIP, D) in one.orders]
    assert flipped
    assert flipped[0] >= 30.0


def test_workers_of_other_sizes_do_not_flip() -> None:
    unequal = replace(SHARED, decode=PoolBounds(most=6, devices=2), budget=9)
    decisions = Law(unequal).run(
        ready(3, 0.3), ready(1, 20.0), replace(QUIET, arrival_rate=2.0, answer_tokens=600.0), seconds=30
    )
    assert not [order for one in decisions for order in one.orders if order.verb is Verb.FLIP]


def test_a_full_budget_is_shared_by_need() -> None:
    tight = replace(SHARED, budget=5)
    (decision,) = Law(tight).run(ready(1), ready(1), replace(QUIET, arrival_rate=20.0))
    added = {order.role: order.number for order in decision.orders if order.verb is Verb.ADD}
    assert sum(added.values()) == 3
    assert decision.pools[P].reason is Reason.BUDGET


def test_workers_beyond_the_budget_are_removed_without_delay() -> None:
    (decision,) = Law(replace(SHARED, budget=4)).run(ready(3, 0.3), ready(2, 2.0))
    assert [order.verb for order in decision.orders] == [Verb.DRAIN]


@pytest.mark.parametrize(
    "change",
    [
        {"prefill": PoolBounds(least=3, most=2)},
        {"prefill": PoolBounds(least=-1, most=2)},
        {"decode": PoolBounds(least=0, most=0)},
        {"budget": 1},
        {"decode": PoolBounds(least=2, most=2, devices=4), "budget": 8},
    ],
)
def test_a_policy_that_contradicts_itself_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(SettingError):
        replace(POLICY, **change)


def test_a_decision_is_one_line_and_plain_data() -> None:
    law = Law(replace(POLICY, damping=Damping(), goals=Goals(ttft=0.3, itl=0.05)))
    (decision,) = law.run(ready(1, 5.0), ready(1, 2.0), replace(SLOW_FIRST, arrival_rate=4.0))
    assert "\n" not in decision.line
    assert decision.line.startswith("prefill 1→")
    assert "TTFT p90 4000/" in decision.line
    assert "feed-forward" in decision.line
    facts = decision.as_dict()
    assert facts["pools"]["prefill"]["desired"] == decision.pools[P].desired
    assert facts["orders"][0]["verb"] == "add"
