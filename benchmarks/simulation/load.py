"""Requests over time: steps, ramps, spikes, a day, and recorded traces."""

import csv
import math
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from contract.errors import SettingError

Rate = Callable[[float], float]
"""Requests per second at a time."""
DAY_SECONDS = 86_400.0


@dataclass(frozen=True)
class Arrival:
    """A request that arrives. Its answer has at least one token."""

    time: float
    prompt_tokens: int
    answer_tokens: int


@dataclass(frozen=True)
class Lengths:
    """Lengths of prompts and answers, in tokens, with exponential tails: mean, and least."""

    prompt_tokens: float = 600.0
    answer_tokens: float = 120.0
    least: int = 8

    def sample(self, random_numbers: random.Random) -> tuple[int, int]:
        """Return a prompt's and an answer's length, each at most six times the mean."""
        return (
            self._one(self.prompt_tokens, random_numbers),
            self._one(self.answer_tokens, random_numbers),
        )

    def _one(self, mean: float, random_numbers: random.Random) -> int:
        return round(max(self.least, min(6.0 * mean, random_numbers.expovariate(1.0 / mean))))


def arrivals(rate: Rate, most: float, duration: float, lengths: Lengths, seed: int) -> list[Arrival]:
    """Return random arrivals (a Poisson process) at a rate that is never above ``most``."""
    random_numbers = random.Random(seed)
    found = []
    time = random_numbers.expovariate(most)
    while time < duration:
        if random_numbers.random() * most < rate(time):
            found.append(Arrival(time, *lengths.sample(random_numbers)))
        time += random_numbers.expovariate(most)
    return found


def steps(*parts: tuple[float, float]) -> Rate:
    """Return a rate that changes at times: parts of (time, requests per second), the first one at 0."""
    times = [time for time, _ in parts]
    return lambda time: parts[max(0, bisect_right(times, time) - 1)][1]


def ramp(start: float, end: float, before: float, after: float) -> Rate:
    """Return a rate that goes evenly from ``before`` to ``after``, between two times."""

    def rate(time: float) -> float:
        return before + (after - before) * min(1.0, max(0.0, (time - start) / (end - start)))

    return rate


def day(night: float, noon: float, seconds: float = DAY_SECONDS) -> Rate:
    """Return a rate that is lowest at the beginning and end of each day of ``seconds``, and highest halfway."""
    return lambda time: night + (noon - night) * (1.0 - math.cos(2.0 * math.pi * time / seconds)) / 2.0


def azure_trace(path: Path) -> list[Arrival]:
    """Read a trace of the Azure LLM inference data set of 2023 (Patel et al. 2024). The first request arrives at 0.

    Raises SettingError if the file cannot be used.
    """
    try:
        with path.open(newline="") as file:
            rows = [
                (
                    datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp(),
                    int(row["ContextTokens"]),
                    max(1, int(row["GeneratedTokens"])),
                )
                for row in csv.DictReader(file)
            ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingError(f"trace {path} cannot be used: {error!r}") from error
    if not rows:
        raise SettingError(f"trace {path} has no requests")
    first = min(time for time, _, _ in rows)
    return sorted((Arrival(time - first, *lengths) for time, *lengths in rows), key=lambda one: one.time)


def scaled(trace: Sequence[Arrival], *, time: float = 1.0, tokens: float = 1.0) -> list[Arrival]:
    """Return a trace that is stretched in time, and whose prompts and answers have ``tokens`` times as many tokens."""
    return [
        Arrival(
            one.time * time,
            max(1, round(one.prompt_tokens * tokens)),
            max(1, round(one.answer_tokens * tokens)),
        )
        for one in trace
    ]
