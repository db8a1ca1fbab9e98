"""The rate of arrivals when a worker that is ordered now will be ready.

The forecast is the greatest of three: the moving average, Holt's trend (damped, Gardner and McKenzie 1985), and the rate at
the same time of the day before.
"""

import math
from dataclasses import dataclass, replace

from autoscaler.signals import RATE_SECONDS

_AVERAGE_SECONDS = 60.0
_LEVEL_GAIN = 0.3
_TREND_GAIN = 0.05
_DAMPING = 0.95
"""The factor by which a trend is expected to weaken from one reading to the next."""
_MOST_GROWTH = 2.0
"""The trend forecasts at most this multiple of the present rate: a step is not the beginning of a slope without an end."""
_SLOT_SECONDS = 300.0
_TREND_SECONDS = 40.0
"""Seconds of arrivals that are in the level of the trend, about: it is a moving mean of readings."""
_DEVIATIONS = 2.0
"""Standard deviations of random arrivals that may be chance."""
_DAY_SLOTS = 288


@dataclass(frozen=True)
class Expected:
    """A rate of arrivals that is expected. noise: the part of it, 0..1, that may be chance."""

    rate: float
    noise: float = 0.0

    def with_backlog(self, rate: float) -> "Expected":
        """Return the rate together with that of requests that wait already, which are certain."""
        total = self.rate + rate
        return Expected(total, self.noise * self.rate / total if total > 0.0 else 0.0)


@dataclass(frozen=True)
class Slot:
    """The mean rate of one slot of a day. number: counts the slots since the clock's zero."""

    number: int
    mean: float
    num_readings: int = 1

    def with_reading(self, rate: float) -> "Slot":
        """Return the slot with one reading more."""
        num_readings = self.num_readings + 1
        return Slot(self.number, self.mean + (rate - self.mean) / num_readings, num_readings)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The remembered rates. recent: (time, rate) of the last minute. days: slots of the last day and a half."""

    recent: tuple[tuple[float, float], ...] = ()
    level: float = 0.0
    trend: float = 0.0
    days: tuple[Slot, ...] = ()

    def with_reading(self, time: float, rate: float) -> "Forecast":
        """Return the forecast after one more reading. Readings come every few seconds, at times that never decrease."""
        kept = tuple(one for one in self.recent if one[0] > time - _AVERAGE_SECONDS)
        level = rate
        trend = 0.0
        if self.recent:
            expected = self.level + _DAMPING * self.trend
            level = expected + _LEVEL_GAIN * (rate - expected)
            trend = _DAMPING * self.trend + _TREND_GAIN * (level - self.level - _DAMPING * self.trend)
        number = int(time // _SLOT_SECONDS)
        if self.days and self.days[-1].number == number:
            days = (*self.days[:-1], self.days[-1].with_reading(rate))
        else:
            known = (slot for slot in self.days if slot.number > number - _DAY_SLOTS - _DAY_SLOTS // 2)
            days = (*known, Slot(number, rate))
        return replace(self, recent=(*kept, (time, rate)), level=level, trend=trend, days=days)

    def at(self, time: float, horizon: float) -> Expected:
        """Return the rate that is expected ``horizon`` seconds after ``time``."""
        if not self.recent:
            return Expected(0.0)
        trend = self.level
        span = self.recent[-1][0] - self.recent[0][0]
        if span > 0.0:
            num_readings = horizon * (len(self.recent) - 1) / span
            growth = self.trend * _DAMPING * (1.0 - math.pow(_DAMPING, num_readings)) / (1.0 - _DAMPING)
            trend = min(self.level + growth, _MOST_GROWTH * self.level)
        if (certain_trend := _certain(trend, _TREND_SECONDS)) <= self._average:
            trend = 0.0  # it may be chance
        slot = int((time + horizon) // _SLOT_SECONDS) - _DAY_SLOTS
        before = next((one.mean for one in self.days if one.number == slot), 0.0)
        rate = max(self._average, trend, before)
        if rate <= 0.0:
            return Expected(0.0)
        seconds = self.recent[-1][0] - self.recent[0][0] + RATE_SECONDS
        least = max(_certain(self._average, seconds), certain_trend, before)
        return Expected(rate, 1.0 - least / rate)

    @property
    def _average(self) -> float:
        return sum(rate for _, rate in self.recent) / len(self.recent)


def _certain(rate: float, seconds: float) -> float:
    """Return the part of a rate, counted for ``seconds``, that is no chance: arrivals are random."""
    return max(0.0, rate - _DEVIATIONS * math.sqrt(max(0.0, rate) / seconds))
