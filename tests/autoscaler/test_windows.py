"""Requests from the rates of a recorded day."""

import random
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from benchmarks.simulation.load import DAY_SECONDS, Arrival, Lengths
from benchmarks.simulation.windows import Window, arrivals_in, lengths_of, read_windows
from contract.errors import SettingError

LENGTHS = Lengths()
ROWS = """0,10,1.5,Weibull,0.7,0.1
600,20,2,Gamma,0.25,0.2
1200,0,,,,
86400,5,1,Weibull,1,0.2
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "windows.csv"
    path.write_text(text)
    return path


def test_a_day_is_read(tmp_path: Path) -> None:
    path = written(tmp_path, ROWS)
    assert read_windows(path, 0) == [
        Window(0.0, 10.0, "Weibull", 0.7),
        Window(600.0, 20.0, "Gamma", 0.25),
        Window(1200.0, 0.0, "", 1.0),
    ]
    assert read_windows(path, 1) == [Window(0.0, 5.0, "Weibull", 1.0)]


@pytest.mark.parametrize(
    "text",
    ["", "0\n", "x,1,1,Gamma,1,1\n", "0,-1,1,Gamma,1,1\n", "0,1,1,Gamma,-1,1\n", "86400,1,1,Gamma,1,1\n"],
)
def test_what_is_no_day_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingError, match=r"windows\.csv"):
        read_windows(written(tmp_path, text), 0)
    with pytest.raises(SettingError, match="missing"):
        read_windows(tmp_path / "missing.csv", 0)


@pytest.mark.parametrize(
    ("window", "variation"),
    [
        (Window(0.0, 1.0, "Weibull", 0.7), 1.46),
        (Window(0.0, 1.0, "Gamma", 0.25), 2.0),
        (Window(0.0, 1.0, "", 1.0), 1.0),
    ],
    ids=lambda value: getattr(value, "family", None),
)
def test_times_have_the_mean_and_the_variation_of_their_family(window: Window, variation: float) -> None:
    numbers = random.Random(5)
    gap = window.gap()
    drawn = [gap(numbers) for _ in range(50_000)]
    assert fmean(drawn) == pytest.approx(1.0, rel=0.05)
    assert pstdev(drawn) / fmean(drawn) == pytest.approx(variation, rel=0.08)


@pytest.mark.parametrize("is_poisson", [True, False])
def test_the_mean_rate_is_that_of_the_whole_day(is_poisson: bool) -> None:
    windows = [Window(43_200.0 * number, rate, "Weibull", 0.7) for number, rate in enumerate((30.0, 10.0))]
    found = arrivals_in(windows, 0.5, LENGTHS.sample, 1, is_poisson=is_poisson)
    assert len(found) == pytest.approx(0.5 * DAY_SECONDS, rel=0.03)
    morning = [one for one in found if one.time < 43_200]
    assert len(morning) / len(found) == pytest.approx(0.75, abs=0.02)
    assert all(before.time <= after.time < DAY_SECONDS for before, after in pairwise(found))
    gaps = [after.time - before.time for before, after in pairwise(morning)]
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(1.0 if is_poisson else 1.46, rel=0.08)


def test_lengths_are_drawn_from_a_trace_in_pairs() -> None:
    trace = [Arrival(0.0, 100, 1), Arrival(1.0, 7, 50)]
    drawn = arrivals_in([Window(0.0, 1.0, "", 1.0)], 0.01, lengths_of(trace), 1)
    assert {(one.prompt_tokens, one.answer_tokens) for one in drawn} == {(100, 1), (7, 50)}
