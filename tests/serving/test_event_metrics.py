"""Metrics of frequent events give the same samples as those of ``prometheus_client``."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from serving.metrics import EventCounter, EventHistogram

BOUNDS = (0.005, 0.25, 1.0, 600.0)
values = st.one_of(st.sampled_from((0.0, *BOUNDS)), st.floats(0, 1000, allow_nan=False))


def _text(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


@given(st.lists(values))
def test_a_histogram_is_written_like_the_librarys(observed: list[float]) -> None:
    own, library = CollectorRegistry(), CollectorRegistry()
    ours = EventHistogram(own, "a_seconds", "Time.", BOUNDS)
    theirs = Histogram("a_seconds", "Time.", buckets=BOUNDS, registry=library)
    for value in observed:
        ours.observe(value)
        theirs.observe(value)
    assert _text(own) == _text(library)


@given(st.lists(st.integers(0, 1000)))
def test_a_counter_is_written_like_the_librarys(amounts: list[int]) -> None:
    own, library = CollectorRegistry(), CollectorRegistry()
    ours = EventCounter(own, "b_total", "Things.")
    theirs = Counter("b_total", "Things.", registry=library)
    for amount in amounts:
        ours.add(amount)
        theirs.inc(amount)
    assert _text(own) == _text(library)
