"""Counts what routers would have counted in the last seconds of a simulation."""

from collections import deque
from collections.abc import Iterable
from typing import Any

from autoscaler.signals import (
    ENOUGH_REQUESTS,
    LATENCY_SECONDS,
    LENGTH_SECONDS,
    RATE_SECONDS,
    RECENT_SECONDS,
    LoadSignals,
)
from benchmarks.simulation.load import Arrival
from benchmarks.simulation.worker import SimulatedRequest


class Measures:
    """Owns the samples of the last minutes. Times never decrease."""

    def __init__(self) -> None:
        self._arrivals: deque[tuple[float, Arrival]] = deque()
        self._first_tokens: deque[tuple[float, float]] = deque()
        self._prompts: deque[tuple[float, float, int]] = deque()
        self._steps: deque[tuple[float, float, float]] = deque()

    def arrived(self, now: float, arrival: Arrival) -> None:
        """Count an arrival."""
        self._arrivals.append((now, arrival))

    def first_token(self, now: float, request: SimulatedRequest) -> None:
        """Count a first token."""
        self._first_tokens.append((now, now - request.arrival.time))

    def prompt(self, now: float, seconds: float, num_tokens: int) -> None:
        """Count a prompt that was computed."""
        self._prompts.append((now, seconds, num_tokens))

    def steps(self, now: float, step_seconds: float, num_tokens: float) -> None:
        """Count tokens that came at the pace of a step."""
        self._steps.append((now, step_seconds, num_tokens))

    def load(self, now: float, num_waiting: int, oldest_wait: float) -> LoadSignals:
        """Return the signals of now."""
        _forget(self._arrivals, now - LENGTH_SECONDS)
        _forget(self._first_tokens, now - LATENCY_SECONDS)
        _forget(self._prompts, now - LENGTH_SECONDS)
        _forget(self._steps, now - LATENCY_SECONDS)
        lately = [arrival for time, arrival in self._arrivals if time > now - RECENT_SECONDS]
        counted = lately if len(lately) >= ENOUGH_REQUESTS else [arrival for _, arrival in self._arrivals]
        prompts = [float(arrival.prompt_tokens) for arrival in counted]
        answers = [float(arrival.answer_tokens) for arrival in counted]
        num_recent = sum(time > now - RATE_SECONDS for time, _ in self._arrivals)
        steps = [(seconds, tokens) for _, seconds, tokens in self._steps]
        num_tokens = sum(tokens for _, tokens in steps)
        num_computed = sum(tokens for *_, tokens in self._prompts)
        return LoadSignals(
            arrival_rate=num_recent / min(RATE_SECONDS, now) if now else 0.0,
            prompt_tokens=_mean(prompts),
            uncached_prompt_tokens=_mean(prompts),
            uncached_prompt_tokens_p90=quantile(((each, 1.0) for each in prompts), 0.9) or 0.0,
            answer_tokens=_mean(answers),
            ttft_p90=quantile(((seconds, 1.0) for _, seconds in self._first_tokens), 0.9),
            itl_p90=quantile(steps, 0.9),
            queue_seconds=oldest_wait,
            num_waiting=num_waiting,
            step_seconds=_ratio(sum(seconds * tokens for seconds, tokens in steps), num_tokens),
            prefill_seconds_per_token=_ratio(sum(seconds for _, seconds, _ in self._prompts), num_computed),
        )


def quantile(samples: Iterable[tuple[float, float]], share: float) -> float | None:
    """Return the value that ``share`` of the weight does not exceed; None without samples of (value, weight)."""
    ordered = sorted(samples)
    left = share * sum(weight for _, weight in ordered)
    for value, weight in ordered:
        left -= weight
        if left <= 1e-9:
            return value
    return ordered[-1][0] if ordered else None


def _forget(samples: "deque[Any]", before: float) -> None:
    while samples and samples[0][0] <= before:
        samples.popleft()


def _ratio(total: float, number: float) -> float | None:
    return total / number if number else None


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
