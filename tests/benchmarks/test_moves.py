"""The figures of moved answers, and their bounds."""

from benchmarks.moves import Measured
from benchmarks.moving_pool import Stream


def figures(gaps: list[float], moves: list[float]) -> dict[str, object]:
    return Measured(moves=moves, replays=[1.0], gaps=gaps, steps=[0.02], copies=[0.001]).figures()


def test_a_step_is_a_gap_of_the_same_quantile_as_the_pause() -> None:
    found = figures([0.02] * 90 + [0.06] * 10, [0.12])
    assert (found["bound_ms"], found["is_within_bound"]) == (181.0, True)
    assert found["bound_with_the_usual_gap_ms"] == 61.0
    assert found["undisturbed_gap_ms"] == {"p50": 20.0, "p99": 60.0}


def test_fifty_milliseconds_are_allowed_where_steps_are_short() -> None:
    assert figures([0.004] * 100, [0.05])["is_within_bound"]
    assert not figures([0.004] * 100, [0.052])["is_within_bound"]


def test_the_first_gap_of_a_stream_is_no_step() -> None:
    """The first token comes from the worker that has computed the prompt."""
    stream = Stream(arrivals=[1.0, 1.5, 1.75, 2.0])
    assert stream.undisturbed_gaps == [0.25, 0.25]
