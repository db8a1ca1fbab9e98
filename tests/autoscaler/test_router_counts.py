"""The load, from the metrics of routers."""

import random
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from autoscaler.pools import PoolBook, WorkerFigures, cheapest, figures
from autoscaler.routers import (
    CountHistory,
    RouterCounts,
    parse_counts,
    percentile,
)
from launch.router_admin import merged
from router.answers.answer import Usage
from router.telemetry.metrics import RouterMetrics
from serving.metrics import render
from tests.autoscaler.cases import D, P

TEXT = """
# TYPE kvbaton_request_success_total counter
kvbaton_request_success_total{finished_reason="stop"} 6
kvbaton_request_success_total{finished_reason="length"} 4
# TYPE kvbaton_request_errors_total counter
kvbaton_request_errors_total{kind="cancelled"} 2
# TYPE kvbaton_prompt_tokens_total counter
kvbaton_prompt_tokens_total 1000
# TYPE kvbaton_generation_tokens_total counter
kvbaton_generation_tokens_total 300
# TYPE kvbaton_num_requests_waiting gauge
kvbaton_num_requests_waiting 5
# TYPE kvbaton_num_requests_running gauge
kvbaton_num_requests_running 3
# TYPE kvbaton_queue_seconds gauge
kvbaton_queue_seconds{pool="prefill"} 0.5
kvbaton_queue_seconds{pool="decode"} 2.5
# TYPE kvbaton_time_to_first_token_seconds histogram
kvbaton_time_to_first_token_seconds_bucket{le="0.1"} 8
kvbaton_time_to_first_token_seconds_bucket{le="1.0"} 10
kvbaton_time_to_first_token_seconds_bucket{le="+Inf"} 10
kvbaton_time_to_first_token_seconds_sum 1
kvbaton_time_to_first_token_seconds_count 10
# TYPE kvbaton_request_uncached_prompt_tokens histogram
kvbaton_request_uncached_prompt_tokens_bucket{le="50.0"} 5
kvbaton_request_uncached_prompt_tokens_bucket{le="100.0"} 8
kvbaton_request_uncached_prompt_tokens_bucket{le="200.0"} 10
kvbaton_request_uncached_prompt_tokens_bucket{le="+Inf"} 10
kvbaton_request_uncached_prompt_tokens_sum 750
kvbaton_request_uncached_prompt_tokens_count 10
"""
NOTHING = parse_counts("")


def later(counts: RouterCounts, **sums: float) -> RouterCounts:
    return replace(counts, sums={**counts.sums, **sums})


def test_the_text_is_summed_over_labels() -> None:
    counts = parse_counts(TEXT)
    assert counts.sums["request_success_total"] == 10
    assert counts.queue_seconds == 2.5
    assert counts.buckets["time_to_first_token_seconds"] == {0.1: 8, 1.0: 10, float("inf"): 10}
    assert counts.buckets["inter_token_latency_seconds"] == {}


def test_the_load_is_the_growth_of_all_routers() -> None:
    history = CountHistory()
    history.add(0.0, {"one": NOTHING, "two": NOTHING})
    history.add(10.0, {"one": parse_counts(TEXT), "two": NOTHING})
    load = history.load(WorkerFigures(num_prefill_legs=1))
    assert load is not None
    assert load.arrival_rate == pytest.approx((10 + 2 + 5 + 3) / 10)
    assert load.prompt_tokens == 100
    assert load.uncached_prompt_tokens == 75
    assert load.uncached_prompt_tokens_p90 == pytest.approx(150)
    assert load.answer_tokens == 30
    assert load.ttft_p90 == pytest.approx(0.55)
    assert load.itl_p90 is None
    assert (load.num_waiting, load.queue_seconds) == (4, 2.5)


def test_several_routers_count_together_and_the_longest_queue_counts() -> None:
    one = parse_counts(TEXT)
    other = replace(later(one, num_requests_waiting=2.0), queue_seconds=7.5)
    history = CountHistory()
    history.add(0.0, {"one": NOTHING, "two": NOTHING})
    history.add(10.0, {"one": one, "two": other})
    load = history.load(WorkerFigures())
    assert load is not None
    assert load.arrival_rate == pytest.approx((2 * (10 + 2 + 3) + 5 + 2) / 10)
    assert (load.num_waiting, load.queue_seconds) == (7, 7.5)
    assert (load.prompt_tokens, load.answer_tokens) == (100, 30)


def lengths(values: Iterable[int]) -> RouterCounts:
    """Return the counts of a router that has answered prompts with these lengths beyond a cached beginning."""
    metrics = RouterMetrics()
    for value in values:
        usage = Usage(num_prompt_tokens=value + 3000, num_completion_tokens=1, num_cached_tokens=3000)
        metrics.requests.sizes.observe(usage, "")
    return parse_counts(render(metrics).decode())


@pytest.mark.parametrize(
    ("draw", "least", "most"),
    [
        (lambda numbers: 600.0, 1.0, 1.6),
        (lambda numbers: numbers.uniform(10, 2000), 0.9, 1.1),
        (lambda numbers: numbers.expovariate(1 / 300), 0.9, 1.5),
        (lambda numbers: numbers.choice([100.0] * 8 + [7500.0] * 2), 0.9, 1.35),
        (lambda numbers: numbers.lognormvariate(6.0, 1.5), 0.9, 1.5),
    ],
    ids=["equal", "uniform", "exponential", "two kinds", "heavy tail"],
)
def test_the_p90_of_prompts_follows_their_distribution(
    draw: Callable[[random.Random], float], least: float, most: float
) -> None:
    """A fixed multiple of the mean would be wrong for all but one of these shapes."""
    numbers = random.Random(1)
    drawn = sorted(max(1, round(draw(numbers))) for _ in range(2000))
    history = CountHistory()
    history.add(0.0, {"one": lengths([5] * 500)})
    history.add(10.0, {"one": lengths([5] * 500 + drawn)})
    load = history.load(WorkerFigures())
    assert load is not None
    assert least <= load.uncached_prompt_tokens_p90 / drawn[1800] <= most


def test_lengths_are_those_of_the_last_minutes() -> None:
    history = CountHistory()
    history.add(0.0, {"one": lengths([])})
    history.add(5.0, {"one": lengths([4000] * 100)})
    history.add(10.0, {"one": lengths([4000] * 100)})
    history.add(186.0, {"one": lengths([4000] * 100 + [40] * 10)})
    load = history.load(WorkerFigures())
    assert load is not None
    assert load.uncached_prompt_tokens == 40
    assert load.uncached_prompt_tokens_p90 <= 50


@pytest.mark.parametrize(("number", "mean"), [(100, 40.0), (99, 40.0 + 3960.0 / 2)])
def test_lengths_are_those_of_the_last_minute_if_enough_requests_have_ended_in_it(
    number: int, mean: float
) -> None:
    """Else a load that has changed its kind would be taken for the former one for three minutes."""
    history = CountHistory()
    history.add(0.0, {"one": lengths([])})
    history.add(60.0, {"one": lengths([4000] * number)})
    history.add(119.0, {"one": lengths([4000] * number + [40] * number)})
    load = history.load(WorkerFigures())
    assert load is not None
    assert load.uncached_prompt_tokens == pytest.approx(mean)


def test_requests_whose_prompt_is_bound_do_not_wait_for_workers() -> None:
    history = CountHistory()
    history.add(0.0, {"one": NOTHING})
    history.add(10.0, {"one": parse_counts(TEXT)})
    load = history.load(WorkerFigures(num_prefill_legs=5))
    assert load is not None
    assert (load.num_waiting, load.queue_seconds) == (0, 0.0)


def test_only_the_last_seconds_count() -> None:
    history = CountHistory()
    counts = parse_counts(TEXT)
    for second in range(0, 400, 5):
        history.add(float(second), {"one": later(counts, request_success_total=10.0 + second)})
    load = history.load(WorkerFigures())
    assert load is not None
    assert load.arrival_rate == pytest.approx(1.0)
    assert load.ttft_p90 is None


def test_a_router_that_was_started_again_counts_from_its_start() -> None:
    history = CountHistory()
    history.add(0.0, {"one": later(NOTHING, request_success_total=500.0)})
    history.add(10.0, {"one": later(NOTHING, request_success_total=20.0)})
    load = history.load(WorkerFigures())
    assert load is not None
    assert load.arrival_rate == pytest.approx(2.0)


def test_there_is_no_load_without_a_router() -> None:
    history = CountHistory()
    history.add(0.0, {"one": NOTHING})
    assert history.load(WorkerFigures()) is None
    history.add(5.0, {})
    assert history.load(WorkerFigures()) is None
    history.add(10.0, {"one": NOTHING})
    assert history.load(WorkerFigures()) is not None


def done(number: float) -> RouterCounts:
    return later(NOTHING, request_success_total=number)


def rate_of(history: CountHistory) -> float:
    load = history.load(WorkerFigures())
    assert load is not None
    return load.arrival_rate


@pytest.mark.parametrize("others", [{}, {"other": NOTHING}], ids=["alone", "beside another one"])
@pytest.mark.parametrize("seconds_away", [5, 20, 60, 600])
def test_a_router_that_was_away_counts_from_its_last_reading(
    seconds_away: int, others: dict[str, RouterCounts]
) -> None:
    """Its requests of all days before are no load of now; else each gap would look like a spike."""
    history = CountHistory()
    for second in range(0, 61, 5):
        history.add(float(second), {"one": done(1e6 + second), **others})
    back = 60 + 5 + seconds_away
    for second in range(65, back, 5):
        history.add(float(second), others)
    for second in range(back, back + 40, 5):
        history.add(float(second), {"one": done(1e6 + second), **others})
        assert rate_of(history) == pytest.approx(1.0)


def test_what_has_piled_up_while_a_router_was_away_is_no_spike() -> None:
    """The requests of a frozen router arrive when it goes on, after it was read."""
    history = CountHistory()
    for second in range(0, 31, 5):
        history.add(float(second), {"one": done(second)})
    history.add(60.0, {"one": done(30.0)})
    history.add(65.0, {"one": done(65.0)})
    assert rate_of(history) == pytest.approx(1.0)


def test_a_router_that_is_read_for_the_first_time_counts_from_then_on() -> None:
    history = CountHistory()
    history.add(0.0, {"one": done(100.0)})
    history.add(5.0, {"one": done(105.0), "two": done(1e6)})
    assert rate_of(history) == pytest.approx(1.0)
    history.add(10.0, {"one": done(110.0), "two": done(1e6 + 5)})
    assert rate_of(history) == pytest.approx(2.0)
    history.add(15.0, {"three": done(5e6)})
    history.add(400.0, {"three": done(5e6 + 385)})
    assert rate_of(history) == pytest.approx(1.0)


def test_a_router_that_does_not_answer_counts_by_what_was_read() -> None:
    history = CountHistory()
    for second in range(0, 21, 5):
        history.add(float(second), {"one": done(second), "two": done(second)})
    history.add(25.0, {"one": done(25.0)})
    assert 1.5 < rate_of(history) < 2.0
    history.add(50.0, {"one": done(50.0)})
    assert rate_of(history) == pytest.approx(1.0)


def test_a_percentile_is_interpolated_within_its_bucket() -> None:
    inf = float("inf")
    assert percentile([(0.1, 10), (0.2, 20), (inf, 20)], 0.9) == pytest.approx(0.18)
    assert percentile([(0.1, 10), (0.2, 10), (inf, 20)], 0.9) == pytest.approx(0.2)
    assert percentile([(0.1, 0), (inf, 0)], 0.9) is None
    assert percentile([], 0.9) is None


def facts(name: str, role: str, state: str = "serving", **more: object) -> dict[str, object]:
    known = {
        "id": name,
        "role": role,
        "state": state,
        "num_legs": 1,
        "max_requests": 8,
        "num_leg_tokens": 100,
        "max_tokens": 1000,
        "num_running": 1,
        "prefix_hit_rate": None,
        "step_seconds": None,
        "prefill_seconds_per_token": None,
    }
    return {**known, **more}


def test_workers_of_several_routers_are_counted_once_and_their_legs_add_up() -> None:
    one = [facts("prefill-0", "prefill"), facts("decode-0", "decode", step_seconds=0.02)]
    other = [facts("prefill-0", "prefill", num_legs=3)]
    workers = merged([one, other])
    assert workers["prefill-0"]["num_legs"] == 4
    assert workers["prefill-0"]["max_requests"] == 16
    assert one[0]["num_legs"] == 1
    alike = merged([other, other])["prefill-0"]
    assert (alike["num_legs"], alike["max_requests"]) == (6, 16)
    assert figures(workers) == WorkerFigures(num_prefill_legs=4, step_seconds=0.02)


@pytest.mark.parametrize(
    ("states", "shown"),
    [
        (("starting", "serving"), "serving"),
        (("leaving", "serving"), "serving"),
        (("serving", "changing"), "changing"),
        (("empty", "draining"), "draining"),
        (("serving", "draining"), "draining"),
        (("empty", "empty"), "empty"),
    ],
)
def test_the_state_of_a_worker_is_that_of_the_router_that_knows_most(
    states: tuple[str, str], shown: str
) -> None:
    lists = [[facts("decode-0", "decode", state)] for state in states]
    assert merged(lists)["decode-0"]["state"] == merged(lists[::-1])["decode-0"]["state"] == shown


def test_workers_are_sorted_by_their_states_and_those_without_one_start() -> None:
    book = PoolBook()
    launched = [("prefill-0", P), ("prefill-1", P), ("decode-0", D), ("decode-1", D)]
    workers = {
        "prefill-0": facts("prefill-0", "prefill"),
        "decode-0": facts("decode-0", "decode", "empty"),
        "decode-1": facts("decode-1", "prefill", "changing"),
    }
    names = [name for name, _ in launched]
    book.update(95.0, [one for one in launched if one[0] != "prefill-1"], workers)
    pools = book.update(100.0, launched, workers)
    assert (pools[P].num_ready, pools[P].starting_ages, pools[P].num_changing) == (1, (0.0,), 1)
    assert (pools[D].num_ready, pools[D].num_draining, pools[D].num_keepable) == (0, 1, 0)
    assert book.update(107.0, launched, workers, keepable={"decode-0"})[D].num_keepable == 1
    assert book.update(107.0, launched, workers)[P].starting_ages == (7.0,)
    assert book.oldest_start(P, names) == "prefill-1"
    assert book.oldest_start(P, ["prefill-0"]) is None
    assert book.oldest_start(D, names) is None
    assert PoolBook().start_seconds is None
    workers["prefill-1"] = facts("prefill-1", "prefill")
    assert book.update(112.0, launched, workers)[P].num_ready == 2
    assert book.start_seconds == 12.0
    assert book.oldest_start(P, names) is None


def test_a_start_that_was_given_up_makes_the_next_one_wait_longer() -> None:
    """Else a machine on which starts are slower than expected would replace its workers for ever."""
    book = PoolBook()
    book.update(0.0, [("prefill-0", P)], {})
    book.update(61.0, [("prefill-0", P)], {})
    book.give_up("prefill-0", 66.0)
    assert book.start_seconds == 66.0
    again = book.update(71.0, [("prefill-0", P)], {})
    assert again[P].starting_ages == (0.0,)  # another process has the name


ONE = [("prefill-0", P)]
SERVES = {"prefill-0": facts("prefill-0", "prefill")}


def test_a_worker_that_has_lost_its_router_is_no_start() -> None:
    """It is back in a moment. A median of such moments would give up every real start."""
    book = PoolBook()
    book.update(0.0, ONE, SERVES)
    assert book.update(5.0, ONE, {})[P].starting_ages == (0.0,)
    book.update(10.0, ONE, SERVES)
    assert book.start_seconds is None


def test_a_start_that_began_before_the_autoscaler_is_not_measured() -> None:
    book = PoolBook()
    book.update(0.0, ONE, {})
    book.update(5.0, ONE, SERVES)
    assert book.start_seconds is None


def test_a_start_that_ends_without_a_worker_is_not_measured() -> None:
    book = PoolBook()
    book.update(0.0, [], {})
    book.update(5.0, ONE, {})
    book.update(10.0, [], {})
    assert book.start_seconds is None


def test_while_routers_are_away_no_start_gets_older_and_none_is_measured() -> None:
    book = PoolBook()
    book.update(0.0, [], {})
    book.update(5.0, ONE, {})
    for second in range(10, 200, 5):
        held = book.update(float(second), ONE, {}, is_known=False)
        assert held[P].starting_ages == (0.0,)
    assert book.update(200.0, ONE, {})[P].starting_ages == (5.0,)
    book.update(205.0, ONE, SERVES)
    assert book.start_seconds is None


def test_the_victim_has_the_fewest_tokens_and_can_be_removed() -> None:
    workers = [
        facts("decode-0", "decode", num_leg_tokens=500),
        facts("decode-1", "decode", num_leg_tokens=200),
        facts("decode-2", "decode", "draining", num_leg_tokens=0),
        facts("elsewhere", "decode", num_leg_tokens=0),
    ]
    launched = [(f"decode-{number}", D) for number in range(3)]
    assert cheapest(workers, D, launched) == "decode-1"
    assert cheapest(workers, P, launched) is None
