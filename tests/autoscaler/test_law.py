"""The law: what single situations lead to."""

from dataclasses import replace
from typing import Any

import pytest

from autoscaler.decision import Order, Verb
from autoscaler.law import decide
from autoscaler.memory import Level, Memory
from autoscaler.policy import Damping, Goals, PoolBounds, ScalingPolicy
from autoscaler.signals import LoadSignals, PoolSignals
from contract.errors import SettingError
from contract.scaling import ScalingReason
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
    assert decision.pools[P].reason is ScalingReason.FORECAST


def test_a_missed_goal_of_a_busy_pool_adds_workers_to_it_alone() -> None:
    law = Law()
    law.run(ready(1, 3.0), ready(1, 2.0), seconds=30)
    assert {order.role for order in orders(law, ready(1, 3.0), ready(1, 2.0), SLOW_FIRST)} == {P}
    law = Law()
    law.run(ready(1, 0.3), ready(1, 40.0), seconds=60)
    decision = law.run(ready(1, 0.3), ready(1, 40.0), SLOW_STEPS)[-1]
    assert [(order.verb, order.role) for order in decision.orders] == [(Verb.ADD, D)]
    assert decision.pools[D].reason is ScalingReason.LATENCY


def test_a_slow_pool_without_load_needs_no_worker() -> None:
    law = Law()
    assert not any(one.orders for one in law.run(ready(1, 0.1), ready(1, 1.0), SLOW_STEPS, seconds=120))


def test_a_queue_shows_in_two_decisions_that_a_pool_is_full() -> None:
    """One prompt at a time may be an accident; six that wait for one worker are none."""
    late = replace(QUIET, ttft_p90=1.6)
    for in_flight, grows in ((1.0, False), (6.0, True)):
        law = Law()
        law.run(ready(1, 0.1), ready(1, 2.0), seconds=60)
        decisions = law.run(ready(1, in_flight), ready(1, 2.0), late, seconds=10)
        assert any(Order(Verb.ADD, P) in one.orders for one in decisions) is grows


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


def test_a_removal_that_is_taken_back_makes_the_next_one_wait_four_times_as_long() -> None:
    law = Law()
    law.run(ready(2, 0.3), ready(1, 2.0), seconds=180)
    assert orders(law, ready(2, 0.3), ready(1, 2.0)) == {Order(Verb.DRAIN, P)}
    law.run(ready(1, 3.0), ready(1, 2.0), seconds=60)
    assert {order.verb for order in orders(law, ready(1, 3.0), ready(1, 2.0), SLOW_FIRST)} == {Verb.ADD}
    decisions = law.run(ready(2, 0.3), ready(1, 2.0), seconds=900)
    removed = next(one.time for one in decisions if one.orders)
    assert removed - decisions[0].time >= 4 * 180.0 - 10.0


def test_only_the_number_that_was_taken_back_waits_longer() -> None:
    """The third worker has never been missed; the second one has."""
    law = Law()
    law.run(ready(2, 0.3), ready(1, 2.0), seconds=180)
    assert orders(law, ready(2, 0.3), ready(1, 2.0)) == {Order(Verb.DRAIN, P)}
    law.run(ready(1, 3.0), ready(1, 2.0), seconds=60)
    burst = replace(QUIET, arrival_rate=22.0, answer_tokens=12.0)
    assert orders(law, ready(1, 3.0), ready(1, 2.0), burst) == {Order(Verb.ADD, P, 2)}
    first = law.run(ready(3, 0.3), ready(1, 2.0), seconds=300)
    assert any(Order(Verb.DRAIN, P) in one.orders for one in first)
    second = law.run(ready(2, 0.3), ready(1, 2.0), seconds=720)
    removed = next(one.time for one in second if one.orders)
    assert removed - first[0].time >= 4 * 180.0 - 10.0


def test_a_regret_is_forgotten_after_a_long_time_without_the_worker() -> None:
    assert Level().grown(0.0, 180.0).num_regrets == 0
    level = Level(removed_at=0.0)
    for away, num_regrets in ((100.0, 1), (7.9 * 180.0, 1), (8.1 * 180.0, 0)):
        assert level.grown(away, 180.0).num_regrets == num_regrets
    regretted = replace(level, num_regrets=2)
    assert regretted.wait(180.0) == 16 * 180.0
    for away, num_regrets in ((100.0, 2), (7.9 * 16 * 180.0, 2), (8.1 * 16 * 180.0, 0)):
        assert regretted.grown(away, 180.0).num_regrets == num_regrets


def test_a_rate_that_may_be_chance_adds_no_worker() -> None:
    """Both loads need two workers by their means, but one has 8 requests within the time of the mean, the other 240."""
    few = replace(
        QUIET, arrival_rate=0.1, uncached_prompt_tokens=15_000.0, uncached_prompt_tokens_p90=15_000.0
    )
    many = replace(QUIET, arrival_rate=3.0, uncached_prompt_tokens=700.0, uncached_prompt_tokens_p90=1300.0)
    for load, grows in ((few, False), (many, True)):
        (decision,) = Law().run(ready(1, 0.3), ready(1, 2.0), load)
        assert 1.1 < decision.pools[P].forecast < 2.0
        assert any(order.role is P for order in decision.orders) is grows


def test_a_pool_keeps_the_more_workers_the_fewer_requests_its_load_has() -> None:
    """Few long prompts need as many workers as many short ones, and their number is more uncertain."""
    few = replace(QUIET, arrival_rate=0.1, uncached_prompt_tokens=5500.0, uncached_prompt_tokens_p90=5500.0)
    many = replace(QUIET, arrival_rate=4.0, uncached_prompt_tokens=250.0, uncached_prompt_tokens_p90=300.0)
    for load, shrinks in ((few, False), (many, True)):
        law = Law()
        decisions = law.run(ready(2, 0.3), ready(1, 2.0), replace(load, ttft_p90=0.6), seconds=300)
        assert 0.5 < decisions[-1].pools[P].forecast < 0.85
        assert any(Order(Verb.DRAIN, P) in one.orders for one in decisions) is shrinks


def test_a_few_slow_requests_are_no_reason_and_thirty_are() -> None:
    """At a request in ten seconds the 90th percentile is that of one of them."""
    slow = replace(SLOW_FIRST, num_waiting=0, queue_seconds=0.0)
    for rate, seconds in ((0.1, 275.0), (0.5, 35.0), (1.0, 5.0)):
        load = replace(slow, arrival_rate=rate)
        law = Law()
        law.run(ready(1, 3.0), ready(1, 2.0), replace(QUIET, arrival_rate=rate), seconds=120)
        decisions = law.run(ready(1, 3.0), ready(1, 2.0), load, seconds=300)
        grown = next(one for one in decisions if one.orders)
        assert grown.orders == (Order(Verb.ADD, P),)
        assert grown.time - 120.0 == pytest.approx(seconds, abs=5.0)


def test_a_pool_grows_for_its_latency_by_a_tenth_and_by_one_worker_at_least() -> None:
    for present, added in ((1, 1), (5, 1), (20, 2)):
        law = Law(replace(POLICY, prefill=PoolBounds(most=40)))
        law.run(ready(present, 3.0 * present), ready(1, 2.0), seconds=30)
        assert orders(law, ready(present, 3.0 * present), ready(1, 2.0), SLOW_FIRST) == {
            Order(Verb.ADD, P, added)
        }


def test_signals_that_are_away_hold_everything_and_begin_the_waits_anew() -> None:
    law = Law()
    law.run(ready(4, 0.3), ready(1, 2.0), seconds=175)
    away = law.run(ready(4, 0.3), ready(1, 2.0), None, seconds=60)
    assert not any(one.orders for one in away)
    assert {pool.reason for pool in away[-1].pools.values()} == {ScalingReason.NO_SIGNALS}
    assert "held" in away[-1].line
    back = law.run(ready(4, 0.3), ready(1, 2.0), seconds=180)
    assert not any(one.orders for one in back)
    assert orders(law, ready(4, 0.3), ready(1, 2.0)) == {Order(Verb.DRAIN, P)}


def test_long_prompts_do_not_hold_a_pool_that_has_little_to_do() -> None:
    """Their latency is near the goal with any number of workers; a missed goal holds the pool all the same."""
    for first, shrinks in ((1.2, True), (1.6, False)):
        law = Law()
        decisions = law.run(ready(2, 0.1), ready(1, 2.0), replace(QUIET, ttft_p90=first), seconds=600)
        assert any(Order(Verb.DRAIN, P) in one.orders for one in decisions) is shrinks


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
    assert decision.pools[P].reason is ScalingReason.IN_FLIGHT


def test_a_worker_that_starts_for_three_times_the_median_is_given_up_and_replaced() -> None:
    load = replace(QUIET, arrival_rate=4.0)
    waiting = replace(ready(1), starting_ages=(60.0,))
    (decision,) = Law().run(waiting, ready(1), load)
    assert not [order for order in decision.orders if order.verb is Verb.FORGET]
    (decision,) = Law().run(replace(waiting, starting_ages=(60.1,)), ready(1), load)
    assert decision.pools[P].present == 1
    assert [order.verb for order in decision.orders if order.role is P] == [Verb.FORGET, Verb.ADD]


def test_a_start_on_a_busy_machine_may_take_longer_than_the_quick_ones_before_it() -> None:
    """The timing file has 20 s, and the starts up to now took 5 s; later the median alone counts."""
    for measured, age, is_given_up in (
        (5.0, 59.0, False),
        (5.0, 61.0, True),
        (40.0, 119.0, False),
        (40.0, 121.0, True),
    ):
        starting = replace(ready(1), starting_ages=(age,))
        decision, _ = decide(
            POLICY, TIMING, Memory(), replace(signals(5.0, starting, ready(1)), start_seconds=measured)
        )
        assert (Order(Verb.FORGET, P) in decision.orders) is is_given_up


def test_a_pool_that_needs_more_keeps_workers_that_drain_before_it_adds_any() -> None:
    draining = replace(ready(1), num_draining=1, num_keepable=1)
    (decision,) = Law().run(draining, ready(1), replace(QUIET, arrival_rate=8.0))
    assert [order for order in decision.orders if order.role is P] == [Order(Verb.KEEP, P)]


def test_a_pool_with_a_worker_that_an_operator_drains_grows_by_others_within_the_bounds() -> None:
    """A worker may drain for ever, and occupies its device until it leaves."""
    draining = replace(ready(1), num_draining=1)
    (decision,) = Law().run(draining, ready(1), replace(QUIET, arrival_rate=8.0))
    (order,) = [order for order in decision.orders if order.role is P]
    assert order.verb is Verb.ADD
    law = Law(replace(POLICY, prefill=PoolBounds(most=2)))
    (decision,) = law.run(draining, ready(1), replace(QUIET, arrival_rate=8.0))
    assert not [order for order in decision.orders if order.role is P]


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
    assert decision.pools[P].reason is ScalingReason.BOUNDS
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
    assert decision.pools[P].reason is ScalingReason.WAKE


SHARED = ScalingPolicy(prefill=PoolBounds(most=6), decode=PoolBounds(most=6), goals=GOALS, budget=6)


def test_a_flip_that_the_source_can_spare_goes_before_an_addition() -> None:
    law = Law(SHARED)
    busy = replace(QUIET, arrival_rate=2.0, answer_tokens=600.0)
    first, second = law.run(ready(3, 0.3), ready(1, 20.0), busy, seconds=10)
    assert not first.orders
    assert second.orders == (Order(Verb.FLIP, P),)
    assert (second.pools[P].desired, second.pools[D].desired) == (2, 2)
    assert "a flip leaves prefill at" in second.line


def test_a_worker_that_was_needed_a_minute_ago_does_not_flip_where_one_can_be_added() -> None:
    busy = replace(QUIET, arrival_rate=2.0, answer_tokens=600.0)
    for in_flight, verb in ((0.3, Verb.FLIP), (2.7, Verb.ADD)):
        law = Law(SHARED)
        assert not any(
            one.orders
            for one in law.run(ready(3, in_flight), ready(1, 2.0), replace(QUIET, ttft_p90=1.03), seconds=60)
        )
        decisions = law.run(ready(3, 0.3), ready(1, 20.0), busy, seconds=90)
        assert next(order.verb for one in decisions for order in one.orders) is verb


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
    assert decision.pools[P].reason is ScalingReason.BUDGET


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
