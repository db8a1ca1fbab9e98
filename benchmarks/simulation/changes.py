"""The real changes of a load, which the changes of direction of a pool are compared with."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from autoscaler.demand import largest_batch
from autoscaler.policy import Goals
from autoscaler.signals import POOLS
from autoscaler.timing_model import TimingModel
from benchmarks.simulation.load import Arrival
from contract.identity import Role

LEAST_RATIO = 1.5
LEAST_WORKERS = 0.25
LEAST_ERRORS = 3.0
_NUM_PARTS = 10


@dataclass(frozen=True)
class Level:
    """The load of a pool in some minutes. mean: busy workers. error: the standard error of the mean.

    It is estimated from the ten parts of these minutes, and so has the burstiness of the load as well as chance.
    """

    mean: float
    error: float = 0.0


def num_changes(levels: Sequence[Level]) -> int:
    """Return how often a load has really risen or fallen. levels: one after the other.

    A change is a way from a low to a high level, or back: by half of the lower one at least, by a quarter of a worker, and
    by three standard errors of the difference. A rise in several steps is one change, and smaller moves in between are none.
    The greater error counts for both levels: a low level by chance has a small error by chance.
    """
    number = 0
    low = high = levels[0] if levels else Level(0.0)
    is_up: bool | None = None
    for level in levels:
        low = min(low, level, key=_mean)
        high = max(high, level, key=_mean)
        if is_up is not True and _is_change(low, level):
            is_up = True
            high = level
            number += 1
        elif is_up is not False and _is_change(level, high):
            is_up = False
            low = level
            number += 1
    return number


def spans(duration: float, seconds: float) -> list[float]:
    """Return the times that divide a duration into whole spans of so many seconds; a shorter rest belongs to none."""
    return [number * seconds for number in range(int(duration // seconds) + 1)]


def load_levels(
    load: Sequence[Arrival], bounds: Sequence[float], timing: TimingModel, goals: Goals
) -> dict[Role, list[Level]]:
    """Return the busy workers that a load needs of each pool, for each time between two of ``bounds``."""
    parts = {role: [[0.0] * _NUM_PARTS for _ in bounds[1:]] for role in POOLS}
    for one in load:
        span = bisect_right(bounds, one.time) - 1
        if 0 <= span < len(bounds) - 1:
            seconds = (bounds[span + 1] - bounds[span]) / _NUM_PARTS
            part = min(_NUM_PARTS - 1, int((one.time - bounds[span]) / seconds))
            for role in POOLS:
                parts[role][span][part] += busy_seconds(role, one, timing, goals) / seconds
    return {role: [_level(each) for each in parts[role]] for role in POOLS}


def busy_seconds(role: Role, request: Arrival, timing: TimingModel, goals: Goals) -> float:
    """Return the time for which a request keeps a worker of a pool busy; a decode worker that has a full batch."""
    if role is Role.PREFILL:
        return timing.prefill.seconds(request.prompt_tokens)
    context = request.prompt_tokens + request.answer_tokens / 2.0
    batch = largest_batch(timing, goals.itl, context)
    return request.answer_tokens * timing.step_seconds(batch, batch * context) / batch


def _level(parts: Sequence[float]) -> Level:
    return Level(fmean(parts), stdev(parts) / math.sqrt(len(parts)))


def _mean(level: Level) -> float:
    return level.mean


def _is_change(lower: Level, upper: Level) -> bool:
    difference = upper.mean - lower.mean
    return (
        upper.mean >= LEAST_RATIO * lower.mean
        and difference >= LEAST_WORKERS
        and difference >= LEAST_ERRORS * math.sqrt(2.0) * max(lower.error, upper.error)
    )
