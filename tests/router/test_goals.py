"""The goals of latency: which requests met them, and within the last seconds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from contract.errors import ErrorKind
from router.telemetry.goals import GoalCounts, Goals, RecentCounts, attainment
from router.telemetry.metrics import RouterMetrics
from serving.metrics import EventHistogram

GOALS = Goals(ttft_seconds=1.0, itl_seconds=0.1)


def counted() -> tuple[CollectorRegistry, GoalCounts]:
    registry = CollectorRegistry()
    return registry, GoalCounts(registry, GOALS)


def value(registry: CollectorRegistry, slo: str, result: str) -> float | None:
    return registry.get_sample_value("kvbaton_slo_requests_total", {"slo": slo, "result": result})


def test_a_request_meets_a_goal_that_it_does_not_exceed() -> None:
    registry, counts = counted()
    counts.on_answer(1.0, 0.1)
    counts.on_answer(1.1, 0.1)
    counts.on_answer(0.5, 0.2)
    counts.on_answer(0.5, None)  # one token: it has no gap
    assert (value(registry, "ttft", "met"), value(registry, "ttft", "missed")) == (3, 1)
    assert (value(registry, "itl", "met"), value(registry, "itl", "missed")) == (2, 1)
    assert (value(registry, "all", "met"), value(registry, "all", "missed")) == (2, 2)
    assert attainment(counts.counts()) == {"ttft": 0.75, "itl": 2 / 3, "all": 0.5}


def test_without_a_request_there_is_no_attainment() -> None:
    _, counts = counted()
    assert attainment(counts.counts()) == {}


@pytest.mark.parametrize(
    ("kind", "missed"),
    [
        (ErrorKind.WORKER_LOST, 1),
        (ErrorKind.OVERLOADED, 1),
        (ErrorKind.INTERNAL, 1),
        (ErrorKind.CANCELLED, 0),
        (ErrorKind.INVALID_REQUEST, 0),
    ],
)
def test_a_failure_misses_all_goals_unless_the_client_caused_it(kind: ErrorKind, missed: int) -> None:
    metrics = RouterMetrics(GOALS)
    metrics.requests.on_failure(kind)
    assert metrics.requests.times.goals.counts() == [0, missed] * 3


def test_recent_counts_forget_what_is_older() -> None:
    now = 0.0
    total = [0]
    recent = RecentCounts(lambda: list(total), 30.0, lambda: now)
    for _ in range(20):
        now += 5
        total[0] += 1
        recent.sample()
    assert recent.growth() == [6]
    total[0] += 4
    assert recent.growth() == [10]
    for later in (30.0, 30.0):
        now += later
        recent.sample()
    assert recent.growth() == [0]


@given(st.lists(st.floats(0.0, 20.0), min_size=1), st.sampled_from([0.5, 0.9, 1.0]))
def test_a_quantile_lies_in_the_bucket_of_the_true_one(values: list[float], share: float) -> None:
    bounds = (0.5, 1.0, 2.0, 4.0, 10.0)
    histogram = EventHistogram(CollectorRegistry(), "a_seconds", "Time.", bounds)
    for each in values:
        histogram.observe(each)
    found = histogram.quantile(histogram.counts(), share)
    true = sorted(values)[max(0, -(-len(values) * share // 1).__int__() - 1)]
    assert found is not None
    upper = next((bound for bound in bounds if true <= bound), 10.0)
    lower = max((bound for bound in (0.0, *bounds) if bound < true), default=0.0)
    assert min(lower, upper) - 1e-9 <= found <= upper + 1e-9


def test_a_quantile_of_nothing_is_unknown() -> None:
    histogram = EventHistogram(CollectorRegistry(), "a_seconds", "Time.", (1.0,))
    assert histogram.quantile(histogram.counts(), 0.9) is None
