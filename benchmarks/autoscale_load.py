"""The load of ``benchmarks.autoscale_demo``: windows of a recorded trace, scaled to the model and to this machine.

The time of a window runs eight times as fast. A prompt has three tenths of its tokens and an answer a quarter, so that they
fit the demo model. The rate is scaled so that the requests of a part keep a given share of a worker of this machine busy, by
the timing file: many copies of the window are laid over each other, each moved in time, and requests are left out at random.
So a part has the lengths and the longer bursts of many sources like the recorded one, and not its bursts of a few seconds,
which are over before a worker has started. A part that is longer than its window begins it again.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoscaler.policy import Goals
from autoscaler.timing_model import TimingModel
from benchmarks.autoscale_trace import BUSY, STEADY, WINDOWS, Window
from benchmarks.simulation.changes import busy_seconds
from benchmarks.simulation.load import Arrival
from benchmarks.simulation.measures import quantile
from contract.identity import Role

SPEED = 8.0
"""Seconds of the trace that pass in a second."""
PROMPT_SCALE = 0.3
ANSWER_SCALE = 0.25
LONG_ANSWER_SCALE = 13.0
_LEAST_LAYERS = 24
LONGEST_PROMPT = 800
_LONGEST_ANSWER = 520
_GOAL_PROMPTS = 3.0
_GOAL_STEPS = 10.0
_LEAST_TTFT = 0.1
_LEAST_ITL = 0.05


@dataclass(frozen=True)
class Phase:
    """A part of the load. before, after: the load at its begin and end, as busy workers of ``pool``."""

    name: str
    seconds: float
    window: Window
    before: float
    after: float
    pool: Role = Role.PREFILL
    answer_scale: float = ANSWER_SCALE


PHASES = (
    Phase("calm", 150, STEADY, 0.175, 0.175),
    Phase("growing", 90, STEADY, 0.175, 0.7),
    Phase("busy", 30, BUSY, 0.7, 0.7),
    Phase("calm again", 240, STEADY, 0.175, 0.175),
    Phase("spike", 60, BUSY, 0.7, 0.7),
    Phase("after the spike", 60, STEADY, 0.175, 0.175),
    Phase("long answers", 120, STEADY, 1.05, 1.05, Role.DECODE, LONG_ANSWER_SCALE),
    Phase("calm at the end", 150, STEADY, 0.175, 0.175),
)
"""A quarter of an hour. The spike is four times the load before it; the long answers come before its worker is removed."""
_FIVE_MINUTES = {"calm": 30, "growing": 90, "busy": 30, "long answers": 90, "calm at the end": 60}
_MOST_BUSY = 0.85
"""With two cores for all containers two decode workers are hardly faster together than one alone."""
FIVE_MINUTES = tuple(
    replace(
        phase,
        seconds=_FIVE_MINUTES[phase.name],
        before=min(_MOST_BUSY, phase.before),
        after=min(_MOST_BUSY, phase.after),
    )
    for phase in PHASES
    if phase.name in _FIVE_MINUTES
)
"""Some of the phases, at the same pace: a pool grows, and then a worker changes its role."""


def scaled(phases: Sequence[Phase], seconds: float) -> list[Phase]:
    """Return these phases with another length in total."""
    whole = sum(phase.seconds for phase in phases)
    return [replace(phase, seconds=phase.seconds * seconds / whole) for phase in phases]


def goals_for(timing: TimingModel, trace: Sequence[Arrival]) -> Goals:
    """Return goals that this machine reaches: three times a long prompt (90th percentile), and ten times a step alone."""
    prompts = [
        float(fitted(one, ANSWER_SCALE).prompt_tokens)
        for window in WINDOWS
        for one in window.requests_of(trace)
    ]
    long_prompt = quantile(((tokens, 1.0) for tokens in prompts), 0.9) or 0.0
    alone = timing.step_seconds(1, sum(prompts) / len(prompts))
    return Goals(
        ttft=max(_LEAST_TTFT, _GOAL_PROMPTS * timing.prefill.seconds(long_prompt)),
        itl=max(_LEAST_ITL, _GOAL_STEPS * alone),
    )


def fitted(request: Arrival, answer_scale: float) -> Arrival:
    """Return a request of the trace with as many tokens as the demo model can have."""
    return replace(
        request,
        prompt_tokens=_within(PROMPT_SCALE * request.prompt_tokens, LONGEST_PROMPT),
        answer_tokens=_within(answer_scale * request.answer_tokens, _LONGEST_ANSWER),
    )


def arrivals_of(
    phases: Sequence[Phase], trace: Sequence[Arrival], timing: TimingModel, goals: Goals, seed: int
) -> list[Arrival]:
    """Return the requests of all phases, one phase after the other. Raises ValueError if the trace lacks a window."""
    found: list[Arrival] = []
    begin = 0.0
    for number, phase in enumerate(phases):
        window = [fitted(one, phase.answer_scale) for one in phase.window.requests_of(trace)]
        busy = sum(busy_seconds(phase.pool, one, timing, goals) for one in window)
        played = _played(phase, window, busy, random.Random(f"{seed}/{number}"))
        found += [replace(one, time=begin + one.time) for one in played]
        begin += phase.seconds
    return found


def _played(phase: Phase, window: Sequence[Arrival], busy: float, numbers: random.Random) -> list[Arrival]:
    """Return the requests of one phase. busy: seconds for which the whole window keeps one worker busy."""
    length = phase.window.seconds / SPEED
    windows_per_worker = length / busy
    num_layers = max(_LEAST_LAYERS, math.ceil(windows_per_worker * max(phase.before, phase.after)))
    found: list[Arrival] = []
    for _ in range(num_layers):
        shift = numbers.uniform(0.0, length)
        for turn in range(math.ceil(phase.seconds / length)):
            for one in window:
                time = turn * length + (one.time / SPEED + shift) % length
                level = phase.before + (phase.after - phase.before) * time / phase.seconds
                if time < phase.seconds and numbers.random() < windows_per_worker * level / num_layers:
                    found.append(replace(one, time=time))
    return sorted(found, key=lambda one: one.time)


def _within(tokens: float, most: int) -> int:
    return max(1, min(most, round(tokens)))
