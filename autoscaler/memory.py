"""The memory of the law, from one decision to the next."""

from dataclasses import dataclass, field, replace

from autoscaler.demand import Corrections
from autoscaler.forecast import Forecast
from contract.identity import Role

_NEVER = float("-inf")
_USED_GAIN = 0.2
_REGRET_SPAN = 8.0
"""A removal is regretted if its worker is needed again within this multiple of the wait before it."""
_REGRET_FACTOR = 4
MOST_REGRETS = 2


@dataclass(frozen=True)
class Level:
    """One number of workers of a pool. needed_at: when the pool last needed as many, or more.

    removed_at: when it last shrank below them. num_regrets: such removals that were soon taken back.
    """

    needed_at: float = _NEVER
    removed_at: float = _NEVER
    num_regrets: int = 0

    def wait(self, seconds: float) -> float:
        """Return how long the pool must not have needed this number before it shrinks below it.

        seconds: the same for a number without regrets; each regret makes it four times as long.
        """
        return seconds * float(_REGRET_FACTOR**self.num_regrets)

    def grown(self, time: float, seconds: float) -> "Level":
        """Return the level after the pool has grown to it, or beyond it."""
        # A removal that was soon taken back costs a start each time: the next one of this number must wait longer.
        away = time - self.removed_at
        if away < _REGRET_SPAN * self.wait(seconds):
            return replace(self, num_regrets=min(MOST_REGRETS, self.num_regrets + 1))
        is_long = away >= _REGRET_SPAN * seconds * float(_REGRET_FACTOR**MOST_REGRETS)
        return replace(self, num_regrets=0) if is_long else self


@dataclass(frozen=True, kw_only=True)
class PoolMemory:
    """One pool.

    levels: the numbers of workers, from 1 on. num_high: high readings in a row, since ``high_since``. num_ready: workers
    that were ready at the last reading; their number has last changed at ``ready_changed_at``. used: moving mean of the
    used part of the pool. expected: the workers that should be present now; None if that is not certain.
    """

    levels: tuple[Level, ...] = ()
    num_high: int = 0
    high_since: float = _NEVER
    num_ready: int | None = None
    ready_changed_at: float = _NEVER
    used: float = 0.0
    expected: int | None = None

    def with_workers(self, time: float, num_ready: int, used: float) -> "PoolMemory":
        """Return the memory after a reading of the ready workers, and of the part of the pool that is in use."""
        has_changed = self.num_ready is not None and num_ready != self.num_ready
        return replace(
            self,
            num_ready=num_ready,
            ready_changed_at=time if has_changed else self.ready_changed_at,
            used=self.used + _USED_GAIN * (used - self.used),
        )

    def with_reading(self, time: float, *, is_high: bool) -> "PoolMemory":
        """Return the memory after one more reading of the latency."""
        if not is_high:
            return replace(self, num_high=0)
        return replace(
            self, num_high=self.num_high + 1, high_since=self.high_since if self.num_high else time
        )

    def interrupted(self) -> "PoolMemory":
        """Return the memory after a time without signals."""
        # None: the first number after the gap is no change that the latencies have to settle from.
        return replace(self, num_high=0, num_ready=None, expected=None)

    def with_need(self, time: float, number: int) -> "PoolMemory":
        """Return the memory after a decision that proposes this number."""
        known = self.levels + (Level(),) * (number - len(self.levels))
        needed = (replace(level, needed_at=time) for level in known[:number])
        return replace(self, levels=(*needed, *known[number:]))

    def with_change(self, time: float, before: int, after: int, seconds: float) -> "PoolMemory":
        """Return the memory after the pool was ordered to change its number. seconds: see ``Level.wait``."""
        known = self.levels + (Level(),) * (max(before, after) - len(self.levels))
        if after < before:
            changed = [replace(level, removed_at=time) for level in known[after:before]]
            return replace(self, levels=(*known[:after], *changed, *known[before:]))
        changed = [level.grown(time, seconds) for level in known[before:after]]
        return replace(self, levels=(*known[:before], *changed, *known[after:]))

    def most_needed(self, time: float, seconds: float) -> int:
        """Return the greatest number that the pool has needed lately. seconds: see ``Level.wait``."""
        return max(
            (
                number
                for number, level in enumerate(self.levels, 1)
                if time - level.needed_at < level.wait(seconds)
            ),
            default=0,
        )

    @property
    def removed_at(self) -> float:
        """The time at which the pool last shrank."""
        return max((level.removed_at for level in self.levels), default=_NEVER)


@dataclass(frozen=True, kw_only=True)
class FlipMemory:
    """The flips. candidate: the source of the flip that the last decision would have made; num_seen: how often in a row.

    last_source: the source of the last flip, ordered at ``last_at``.
    """

    candidate: Role | None = None
    num_seen: int = 0
    last_source: Role | None = None
    last_at: float = _NEVER

    def with_candidate(self, source: Role | None) -> "FlipMemory":
        """Return the memory after a decision with this candidate."""
        if source is None:
            return replace(self, candidate=None, num_seen=0)
        num_seen = self.num_seen + 1 if source is self.candidate else 1
        return replace(self, candidate=source, num_seen=num_seen)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """All of it; the default is that of an autoscaler that has just started.

    steady_since: since when there were signals without a gap, and only this law has changed the pools; None during a gap.
    """

    forecast: Forecast = field(default_factory=Forecast)
    corrections: Corrections = field(default_factory=Corrections)
    prefill: PoolMemory = field(default_factory=PoolMemory)
    decode: PoolMemory = field(default_factory=PoolMemory)
    flips: FlipMemory = field(default_factory=FlipMemory)
    steady_since: float | None = None

    def pool(self, role: Role) -> PoolMemory:
        """Return the memory of a pool."""
        return self.prefill if role is Role.PREFILL else self.decode
