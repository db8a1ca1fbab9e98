"""Feedback: what the measured latencies and the use of a pool ask for, whatever the timing model predicts."""

import math
from dataclasses import dataclass

from autoscaler.demand import Demand
from autoscaler.policy import Damping
from autoscaler.signals import LoadSignals, PoolSignals, Signals
from contract.identity import Role

_MOST_SHARE = 2.0
_MOST_GROWTH = 1.1
"""A pool grows by this factor at most for its latency, and by one worker at least: queues of a minute ask for more than the
load needs, and the forecast shows what that is."""
_MOST_USED = 2.0
"""A reading of the use counts as this at most: a queue shows sooner than a mean of readings of 1 that a pool is full."""
_CALM = 0.95
_BUSY = 0.8
"""The use of prefill workers above which they are what requests wait for."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One reading of a pool.

    share: the part of its latency that more workers could remove, as a share of what the goal leaves for it, 0..2; None
    without a sample. used: the used part of what the pool can do within the goal, 0..1; more with a queue, up to 2.
    latency, goal: in seconds.
    """

    share: float | None
    used: float
    latency: float | None
    goal: float

    @property
    def product(self) -> float:
        """Share and use together: a slow pool without load, or a full one that is fast, needs no worker."""
        return (self.share or 0.0) * self.used

    def is_high(self, damping: Damping) -> bool:
        """Return True if the pool should grow when the next reading confirms it."""
        return self.product > damping.up_share

    def is_urgent(self, damping: Damping) -> bool:
        """Return True if the pool should grow at once: its goal is missed."""
        return self.is_high(damping) and (self.share or 0.0) > 1.0

    def number(self, present: int, damping: Damping, *, is_confirmed: bool) -> int:
        """Return the number of workers that this reading asks for. is_confirmed: the last reading was high too."""
        if self.is_urgent(damping) or (is_confirmed and self.is_high(damping)):
            return math.ceil(present * min(_MOST_GROWTH, self.product / damping.up_share))
        if self.share is None or self.share > 1.0 or self.product >= damping.down_share or present < 2:
            return present
        fewest = present - math.floor(present * (1.0 - self.product / damping.down_share))
        # Fewer workers have more to do and are slower: both factors grow. The law must not grow again at once.
        calm = math.ceil(present * math.sqrt(self.product / damping.up_share) / _CALM)
        return min(present, max(1, fewest, calm))


def reading(role: Role, signals: Signals, load: LoadSignals, needed: Demand, prefill_used: float) -> Reading:
    """Read the latency and the use of a pool. prefill_used: the mean use of the prefill pool lately.

    First tokens that come late because no decode worker has room count for the decode pool. Prefill workers have little to
    do then: a request holds its room on a decode worker from the beginning, so slow prompts fill the decode pool as well.
    """
    is_waiting = signals.decode.is_full and load.num_waiting > 0
    waits_for_decode = is_waiting and prefill_used < _BUSY
    first = load.ttft_p90
    if load.queue_seconds > 0:
        first = max(first or 0.0, load.queue_seconds)
    first_share = _share(first, needed.prompt_seconds, needed.goals.ttft)
    if role is Role.PREFILL:
        return Reading(
            share=None if waits_for_decode else first_share,
            used=_used(signals.prefill, 1),
            latency=first,
            goal=needed.goals.ttft,
        )
    share = _share(load.itl_p90, needed.step_seconds, needed.goals.itl)
    if waits_for_decode:
        share = max(share or 0.0, first_share or 0.0)
    return Reading(
        share=share,
        used=_used(signals.decode, needed.batch),
        latency=load.itl_p90,
        goal=needed.goals.itl,
    )


def _share(latency: float | None, alone: float, goal: float) -> float | None:
    if latency is None:
        return None
    return min(_MOST_SHARE, max(0.0, (latency - alone) / (goal - alone)))


def _used(pool: PoolSignals, useful_each: int) -> float:
    """Return the used part of a pool. useful_each: legs of a worker beyond which it is too slow."""
    useful = pool.num_ready * useful_each
    if pool.max_in_flight:
        useful = min(useful, pool.max_in_flight)
    return min(_MOST_USED, pool.num_in_flight / useful) if useful else 1.0
