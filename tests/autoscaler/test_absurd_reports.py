"""Reports of workers and routers that no healthy one sends."""

import math

import pytest

from autoscaler.pools import check_facts, figures
from autoscaler.routers import parse_counts


@pytest.mark.parametrize("lie", [1e-9, 3000.0])
def test_one_worker_that_lies_does_not_move_the_figures(lie: float) -> None:
    """A4: the law takes medians."""
    workers = {
        str(number): {
            "id": str(number),
            "role": role,
            "num_legs": 0,
            "step_seconds": seconds,
            "prefill_seconds_per_token": seconds,
        }
        for role, first in (("prefill", 0), ("decode", 3))
        for number, seconds in enumerate((0.02, lie, 0.03), first)
    }
    found = figures(workers)
    assert 0.02 <= (found.step_seconds or 0) <= 0.03
    assert 0.02 <= (found.prefill_seconds_per_token or 0) <= 0.03


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "1e300"])
@pytest.mark.parametrize("name", ["kvbaton_prompt_tokens_total", "kvbaton_queue_seconds"])
def test_a_count_that_is_no_number_is_none_of_a_router(name: str, value: str) -> None:
    labels = '{pool="prefill"}' if name.endswith("seconds") else ""
    with pytest.raises(ValueError, match=name):
        parse_counts(f"# TYPE {name} gauge\n{name}{labels} {value}\n")


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_legs", -1), ("max_tokens", 2**60), ("step_seconds", math.nan), ("num_running", "many")],
)
def test_a_worker_of_a_routers_list_with_an_absurd_number_is_refused(field: str, value: object) -> None:
    good = {"num_legs": 0, "max_requests": 8, "num_leg_tokens": 0, "max_tokens": 64, "num_running": None}
    check_facts([good])
    with pytest.raises(ValueError, match=field):
        check_facts([{**good, field: value}])
