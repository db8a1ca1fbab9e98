"""Requests from the rates of a recorded day: windows of a client in the form of ServeGen (Xiang et al. 2025)."""

import csv
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.simulation.load import DAY_SECONDS, Arrival
from contract.errors import SettingError

Draw = Callable[[random.Random], tuple[int, int]]
"""Returns the tokens of a prompt and of its answer."""
Gap = Callable[[random.Random], float]
"""Returns seconds between two requests, 1 in the mean."""


@dataclass(frozen=True)
class Window:
    """The requests of some minutes. begin: seconds since the first window; rate: per second.

    family: the distribution of the times between two requests, Weibull or Gamma; anything else stands for the exponential
    one. shape: its parameter.
    """

    begin: float
    rate: float
    family: str
    shape: float

    def gap(self) -> Gap:
        """Return the distribution of the times between two requests, for a rate of 1."""
        shape = self.shape
        if self.family == "Weibull":
            mean = math.gamma(1.0 + 1.0 / shape)
            return lambda numbers: numbers.weibullvariate(1.0 / mean, shape)
        if self.family == "Gamma":
            return lambda numbers: numbers.gammavariate(shape, 1.0 / shape)
        return lambda numbers: numbers.expovariate(1.0)


def read_windows(path: Path, day: int) -> list[Window]:
    """Read the windows of one day, from 0 on. Rows: second, rate, coefficient of variation, family, shape, scale.

    Raises SettingError if the file cannot be used or has no such day.
    """
    try:
        with path.open(newline="") as file:
            windows = [
                Window(float(row[0]), float(row[1]), row[3], float(row[4] or 0) or 1.0)
                for row in csv.reader(file)
            ]
    except (OSError, ValueError, IndexError) as error:
        raise SettingError(f"windows {path} cannot be used: {error!r}") from error
    begin = day * DAY_SECONDS
    found = [
        Window(window.begin - begin, window.rate, window.family, window.shape)
        for window in windows
        if begin <= window.begin < begin + DAY_SECONDS
    ]
    if not found or any(window.shape <= 0 or window.rate < 0 for window in found):
        raise SettingError(f"windows {path} have no day {day}, or a shape or rate that is not positive")
    return found


def arrivals_in(
    windows: Sequence[Window], mean_rate: float, draw: Draw, seed: int, *, is_poisson: bool = False
) -> list[Arrival]:
    """Return the requests of a day whose mean rate is ``mean_rate``.

    is_poisson: only the rates are taken from the windows; within one, requests are independent of each other.
    """
    numbers = random.Random(seed)
    factor = mean_rate * len(windows) / sum(window.rate for window in windows)
    ends = [*(window.begin for window in windows[1:]), DAY_SECONDS]
    found: list[Arrival] = []
    for window, end in zip(windows, ends, strict=True):
        gap = Window(0.0, 1.0, "", 1.0).gap() if is_poisson else window.gap()
        times = _times(window.begin, end, factor * window.rate, gap, numbers)
        found.extend(Arrival(time, *draw(numbers)) for time in times)
    return found


def lengths_of(trace: Sequence[Arrival]) -> Draw:
    """Return a function that draws the lengths of a request of a trace."""

    def draw(numbers: random.Random) -> tuple[int, int]:
        one = numbers.choice(trace)
        return one.prompt_tokens, one.answer_tokens

    return draw


def _times(begin: float, end: float, rate: float, gap: Gap, numbers: random.Random) -> Iterator[float]:
    time = begin
    while rate > 0.0:
        time += gap(numbers) / rate
        if time >= end:
            return
        yield time
