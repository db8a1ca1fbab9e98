"""The load, from the metrics of routers."""

from dataclasses import replace

import pytest

from autoscaler.pools import PoolBook, cheapest, figures, merged
from autoscaler.router_counts import (
    CountHistory,
    RouterCounts,
    WorkerFigures,
    parse_counts,
    percentile,
)
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
    load = history.load(WorkerFigures(num_prefill_legs=1, hit_rate=0.25))
    assert load is not None
    assert load.arrival_rate == pytest.approx((10 + 2 + 5 + 3) / 10)
    assert load.prompt_tokens == 100
    assert load.uncached_prompt_tokens == 75
    assert load.answer_tokens == 30
    assert load.ttft_p90 == pytest.approx(0.55)
    assert load.itl_p90 is None
    assert (load.num_waiting, load.queue_seconds) == (4, 2.5)


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
    assert figures(workers) == WorkerFigures(num_prefill_legs=4, step_seconds=0.02)


def test_workers_are_sorted_by_their_states_and_those_without_one_start() -> None:
    book = PoolBook()
    launched = [("prefill-0", P), ("prefill-1", P), ("decode-0", D), ("decode-1", D)]
    workers = {
        "prefill-0": facts("prefill-0", "prefill"),
        "decode-0": facts("decode-0", "decode", "empty"),
        "decode-1": facts("decode-1", "prefill", "changing"),
    }
    pools = book.update(100.0, launched, workers)
    assert (pools[P].num_ready, pools[P].starting_ages, pools[P].num_changing) == (1, (0.0,), 1)
    assert (pools[D].num_ready, pools[D].num_draining) == (0, 1)
    assert book.update(107.0, launched, workers)[P].starting_ages == (7.0,)
    assert book.oldest_start(P, launched) == "prefill-1"
    assert PoolBook().start_seconds is None
    workers["prefill-1"] = facts("prefill-1", "prefill")
    assert book.update(112.0, launched, workers)[P].num_ready == 2
    assert book.start_seconds == 12.0
    assert book.oldest_start(P, launched) is None


def test_a_start_that_was_given_up_makes_the_next_one_wait_longer() -> None:
    """Else a machine on which starts are slower than expected would replace its workers for ever."""
    book = PoolBook()
    book.update(0.0, [("prefill-0", P)], {})
    book.update(61.0, [("prefill-0", P)], {})
    book.update(66.0, [], {})
    assert book.start_seconds == 66.0


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
