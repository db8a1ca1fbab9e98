"""The number of workers that one pool proposes for itself, from the forecast and from its measured latency."""

import math
from dataclasses import dataclass, replace

from autoscaler.demand import Demand
from autoscaler.feedback import Reading, reading
from autoscaler.memory import Memory, PoolMemory
from autoscaler.policy import ScalingPolicy
from autoscaler.signals import LATENCY_SECONDS, PoolSignals, Signals
from contract.identity import Role
from contract.scaling import ScalingReason

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
    memory = before.pool(role)
    workers = signals.pool(role)
    forgotten = sum(age > longest_start for age in workers.starting_ages)
    present = workers.num_ready + len(workers.starting_ages) - forgotten
    now = reading(role, signals, load, needed, before.prefill.used)
    memory = memory.with_ready(signals.time, workers.num_ready).with_used(now.used)
    now = replace(now, used=min(1.0, memory.used))
    memory = memory.with_reading(signals.time, is_high=now.is_high(damping))
    by_forecast = max(0, math.ceil(needed.of(role) - _TOLERANCE))
    if (1.0 - needed.expected.noise) * needed.of(role) - _TOLERANCE <= present:
        by_forecast = min(by_forecast, present)
    by_latency = now.number(present, damping, is_confirmed=memory.num_high >= CONFIRMATIONS)
    high_seconds = signals.time - memory.high_since if memory.num_high else 0.0
    num_measured = needed.expected.rate * (LATENCY_SECONDS + high_seconds)
    is_settled = signals.time - memory.ready_changed_at >= damping.settling
    if num_measured < _LATENCY_REQUESTS or not is_settled:
        by_latency = min(by_latency, present)
    number = max(by_forecast, by_latency)
    reason = ScalingReason.LATENCY if by_latency > by_forecast else ScalingReason.FORECAST
    if load.arrival_rate == 0 and load.num_waiting == 0 and workers.num_in_flight == 0:
        number = 0
        reason = ScalingReason.IDLE
    elif present == 0 and number < 2:
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
