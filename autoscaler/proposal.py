"""The number of workers that one pool proposes for itself: the greater of forecast and feedback.

The forecast is ``demand``, from the timing model. The feedback is a ``Reading`` of the measured latency and the use of the
pool, which asks for workers whatever the timing model predicts; ``propose`` combines both.
"""

import math
from dataclasses import dataclass, replace

from autoscaler.demand import Demand
from autoscaler.memory import Memory, PoolMemory
from autoscaler.policy import Damping, ScalingPolicy
from autoscaler.signals import LATENCY_SECONDS, LoadSignals, PoolSignals, Signals
from contract.identity import Role
from contract.scaling import ScalingReason

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
    # The histogram shows only requests that have a first token: in a jam they are few, and those that were lucky.
    if load.queue_seconds > 0:
        first = max(first or 0.0, load.queue_seconds)
    first_share = _share(first, needed.prompt_seconds, needed.goals.ttft)
    if role is Role.PREFILL:
        return Reading(
            share=None if waits_for_decode else first_share,
            used=_used(signals.prefill, needed.prompts),
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


CONFIRMATIONS = 2
"""Readings in a row that are needed before a pool grows, or a worker flips."""
_TOLERANCE = 0.05
"""A part of a worker that is not added: the forecast is not that exact."""
_MARGIN = 1.15
"""A pool keeps the workers for this multiple of the forecast, so that a little more load does not bring them back."""
_NOISE_MARGIN = 2.0
"""The multiple of the forecast's noise that is added to this margin."""
_LATENCY_REQUESTS = 30.0
"""Requests from which on a 90th percentile shows more than single slow ones."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """One pool in one decision.

    present: workers that serve or are about to. forgotten: those that start for too long. forecast: workers that the
    forecast needs; needed: those that it needs by forecast or latency, as real numbers. number: the whole number that it
    proposes, within its bounds; unbounded: the same without bounds. reason: why. memory: that of the pool, after this
    reading. correction: measured times as a multiple of the model's; is_correction_bounded: it may be farther from 1.
    """

    role: Role
    workers: PoolSignals
    memory: PoolMemory
    present: int
    forgotten: int
    reading: Reading
    forecast: float
    needed: float
    number: int
    unbounded: int
    reason: ScalingReason
    correction: float
    is_correction_bounded: bool

    @property
    def remark(self) -> str:
        """Further facts for the log."""
        given_up = [f"{self.forgotten} given up"] if self.forgotten else []
        bounded = (
            [f"times {self.correction:.2g}x the model's, the bound"] if self.is_correction_bounded else []
        )
        return ", ".join([*given_up, *bounded])

    @property
    def num_starting(self) -> int:
        """Workers that are about to serve."""
        return self.present - self.workers.num_ready

    @property
    def is_changing(self) -> bool:
        """True while a change of the pool is not complete."""
        return bool(self.num_starting or self.workers.num_draining or self.workers.num_changing)

    @property
    def num_existing(self) -> int:
        """The workers that occupy devices when the forgotten ones are removed."""
        return self.workers.num_existing - self.forgotten


def propose(
    policy: ScalingPolicy,
    before: Memory,
    signals: Signals,
    needed: Demand,
    role: Role,
    longest_start: float,
) -> Proposal:
    """Propose a number of workers for a pool. ``signals`` have a load.

    longest_start: seconds after which a worker that is not ready is given up.
    """
    load = signals.load
    assert load is not None
    damping = policy.damping
    workers = signals.pool(role)
    forgotten = sum(age > longest_start for age in workers.starting_ages)
    present = workers.num_ready + len(workers.starting_ages) - forgotten
    now = reading(role, signals, load, needed, before.prefill.used)
    memory = before.pool(role).with_workers(signals.time, workers.num_ready, now.used)
    # A queue counts in the mean as more than a full pool, so that the mean rises soon; it is no more than full itself.
    now = replace(now, used=min(1.0, memory.used))
    memory = memory.with_reading(signals.time, is_high=now.is_high(damping))
    by_forecast = max(0, math.ceil(needed.of(role) - _TOLERANCE))
    # What may be chance starts no worker: it would be drained again minutes later.
    if (1.0 - needed.expected.noise) * needed.of(role) - _TOLERANCE <= present:
        by_forecast = min(by_forecast, present)
    by_latency = now.number(present, damping, is_confirmed=memory.num_high >= CONFIRMATIONS)
    high_seconds = signals.time - memory.high_since if memory.num_high else 0.0
    is_measured = needed.expected.rate * (LATENCY_SECONDS + high_seconds) >= _LATENCY_REQUESTS
    if not is_measured or signals.time - memory.ready_changed_at < damping.settling:
        by_latency = min(by_latency, present)
    number = max(by_forecast, by_latency)
    reason = ScalingReason.LATENCY if by_latency > by_forecast else ScalingReason.FORECAST
    if load.arrival_rate == 0 and load.num_waiting == 0 and workers.num_in_flight == 0:
        number = 0
        reason = ScalingReason.IDLE
    elif present == 0 and number < 2:  # even within the tolerance: requests wait
        number = 1
        reason = ScalingReason.WAKE
    clamped = policy.bounds(role).clamp(number)
    margin = _MARGIN + _NOISE_MARGIN * needed.expected.noise
    kept = min(present, policy.bounds(role).most, math.ceil(margin * needed.of(role) - _TOLERANCE))
    return Proposal(
        role=role,
        workers=workers,
        memory=memory.with_need(signals.time, max(clamped, kept)),
        present=present,
        forgotten=forgotten,
        reading=now,
        forecast=needed.of(role),
        needed=max(needed.of(role), float(number) if number > present else 0.0),
        number=clamped,
        unbounded=number,
        reason=ScalingReason.BOUNDS if number > clamped or present < clamped != number else reason,
        correction=needed.correction(role),
        is_correction_bounded=needed.is_correction_bounded(role),
    )
