"""The memory of the law, from one decision to the next."""

from dataclasses import dataclass, field, replace

from autoscaler.demand import Corrections
from autoscaler.forecast import Forecast
from contract.identity import Role

_NEVER = float("-inf")
_USED_GAIN = 0.2
_MORE_LOAD = 1.3
"""A rate of arrivals is a new one from this multiple of the former one on."""
_MOST_REGRETS = 5


@dataclass(frozen=True, kw_only=True)
class PoolMemory:
    """One pool.

    proposals: (time, number) of the last ``stabilization`` seconds. num_high: high readings in a row. removed_at: when a
    worker was last drained; removed_rate: the rate of arrivals then. grown_at: when the pool last grew. num_regrets:
    removals that had to be taken back. num_ready: workers that were ready at the last reading; their number has last
    changed at ``ready_changed_at``. used: moving mean of the used part of the pool. expected: the workers that should be
    present now; None if that is not certain.
    """

    proposals: tuple[tuple[float, int], ...] = ()
    num_high: int = 0
    removed_at: float = _NEVER
    removed_rate: float = 0.0
    grown_at: float = _NEVER
    num_regrets: int = 0
    num_ready: int | None = None
    ready_changed_at: float = _NEVER
    used: float = 0.0
    expected: int | None = None

    def with_ready(self, time: float, number: int) -> "PoolMemory":
        """Return the memory after a reading with this many ready workers."""
        if self.num_ready is None or number == self.num_ready:
            return replace(self, num_ready=number)
        return replace(self, num_ready=number, ready_changed_at=time)

    def with_used(self, used: float) -> "PoolMemory":
        """Return the memory after one more reading of the use."""
        return replace(self, used=self.used + _USED_GAIN * (used - self.used))

    def with_reading(self, *, is_high: bool) -> "PoolMemory":
        """Return the memory after one more reading of the latency."""
        return replace(self, num_high=self.num_high + 1 if is_high else 0)

    def interrupted(self) -> "PoolMemory":
        """Return the memory after a time without signals."""
        return replace(self, num_high=0, num_ready=None, expected=None)

    def with_removal(self, time: float, rate: float) -> "PoolMemory":
        """Return the memory after a worker was drained. The one before was right if the pool has not grown since."""
        was_right = self.removed_at > self.grown_at
        num_regrets = max(0, self.num_regrets - 1) if was_right else self.num_regrets
        return replace(self, removed_at=time, removed_rate=rate, num_regrets=num_regrets)

    def with_growth(self, time: float, rate: float) -> "PoolMemory":
        """Return the memory after the pool has grown. It regrets its last removal unless there is more load than then."""
        if rate > _MORE_LOAD * self.removed_rate:
            num_regrets = 0
        elif self.removed_at > self.grown_at:
            num_regrets = min(_MOST_REGRETS, self.num_regrets + 1)
        else:
            num_regrets = self.num_regrets
        return replace(self, grown_at=time, num_regrets=num_regrets)

    def may_shrink(self, time: float, seconds: float) -> bool:
        """Return True if the pool last grew ``seconds`` ago or more; twice as long ago for each removal that it regrets."""
        return time - self.grown_at >= seconds * float(1 << self.num_regrets)

    def with_proposal(self, time: float, number: int, seconds: float) -> "PoolMemory":
        """Return the memory after one more proposal; those older than ``seconds`` are dropped."""
        kept = tuple(one for one in self.proposals if one[0] > time - seconds)
        return replace(self, proposals=(*kept, (time, number)))

    @property
    def most_proposed(self) -> int:
        """The greatest number that was proposed lately."""
        return max((number for _, number in self.proposals), default=0)


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
