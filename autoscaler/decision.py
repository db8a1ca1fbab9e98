"""The decisions of the law, and the line that is logged for each."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from autoscaler.policy import ScalingPolicy
from autoscaler.proposal import Reading
from contract.identity import Role
from contract.scaling import HOLDS, Direction, PoolScaling, ScalingReason, ScalingReport


class Verb(StrEnum):
    """An order of the law."""

    ADD = "add"
    """Start workers."""
    DRAIN = "drain"
    """Let workers end their work, and remove them then."""
    KEEP = "keep"
    """Let workers that drain serve again."""
    FLIP = "flip"
    """Let workers take the role of the other pool."""
    FORGET = "forget"
    """Remove workers that do not become ready."""


@dataclass(frozen=True)
class Order:
    """Something to do to ``number`` workers of a pool."""

    verb: Verb
    role: Role
    number: int = 1


@dataclass(frozen=True, kw_only=True)
class PoolDecision:
    """The result for one pool.

    present: workers that serve or are about to. desired: the number after the orders of this decision. proposed: the number
    that the pool proposes, which time and budget may not allow yet. needed: the number that it would have if nothing held
    it, not even the greatest number of its bounds. forecast: workers that the forecast needs. reading: None without signals.
    remark: further facts for the log. correction, is_correction_bounded: see ``Proposal``. least: the least number of its
    bounds.
    """

    present: int
    desired: int
    proposed: int
    needed: int
    reason: ScalingReason
    forecast: float = 0.0
    reading: Reading | None = None
    remark: str = ""
    correction: float = 1.0
    is_correction_bounded: bool = False
    least: int = 1

    def report(self, data_parallel_size: int = 1) -> PoolScaling:
        """Return what routers publish of it. They count the ranks of a group, so the numbers are multiplied by its size."""
        change = self.desired - self.present
        held = self.needed - self.desired
        held_by = None
        if held:  # by one step at a time, if the reason itself holds nothing
            step = ScalingReason.IN_FLIGHT if held > 0 else ScalingReason.STABILIZING
            held_by = self.reason if self.reason in HOLDS else step
        return PoolScaling(
            desired=self.desired * data_parallel_size,
            direction=Direction.UP if change > 0 else Direction.DOWN if change < 0 else Direction.NONE,
            reason=self.reason,
            held=held * data_parallel_size,
            held_by=held_by,
            correction=self.correction,
            is_correction_bounded=self.is_correction_bounded,
            least=self.least * data_parallel_size,
        )


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The result of one run of the law. rate: requests per second that it is made for."""

    time: float
    pools: Mapping[Role, PoolDecision]
    orders: tuple[Order, ...] = ()
    rate: float = 0.0

    @property
    def line(self) -> str:
        """The decision for people, in one line."""
        return " | ".join(_pool_text(role, pool) for role, pool in self.pools.items())

    def report(self, policy: ScalingPolicy) -> ScalingReport:
        """Return what routers publish of it. policy: with which it was made."""
        return ScalingReport(
            prefill=self.pools[Role.PREFILL].report(policy.prefill.data_parallel_size),
            decode=self.pools[Role.DECODE].report(policy.decode.data_parallel_size),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the decision as plain data for JSON."""
        return {
            "time": round(self.time, 3),
            "rate": round(self.rate, 4),
            "pools": {role.value: _pool_facts(pool) for role, pool in self.pools.items()},
            "orders": [
                {"verb": order.verb.value, "pool": order.role.value, "number": order.number}
                for order in self.orders
            ],
        }


def _pool_text(role: Role, pool: PoolDecision) -> str:
    change = f"{pool.present}" if pool.desired == pool.present else f"{pool.present}→{pool.desired}"
    if pool.reason is ScalingReason.NO_SIGNALS:
        return f"{role.value} {change}: held, {pool.remark}"
    name = "TTFT" if role is Role.PREFILL else "ITL"
    parts = [f"feed-forward {pool.forecast:.1f}"]
    if (reading := pool.reading) is not None:
        latency = "-" if reading.latency is None else f"{1e3 * reading.latency:.0f}"
        parts.insert(0, f"{name} p90 {latency}/{1e3 * reading.goal:.0f} ms")
        parts.append(f"used {100 * reading.used:.0f} %")
    if pool.remark:
        parts.append(pool.remark)
    return f"{role.value} {change} ({pool.reason.value}): {', '.join(parts)}"


def _pool_facts(pool: PoolDecision) -> dict[str, Any]:
    reading = pool.reading
    return {
        "present": pool.present,
        "desired": pool.desired,
        "proposed": pool.proposed,
        "needed": pool.needed,
        "reason": pool.reason.value,
        "forecast": round(pool.forecast, 3),
        "latency_p90_seconds": reading and reading.latency,
        "goal_seconds": reading and reading.goal,
        "used": reading and round(reading.used, 3),
        "remark": pool.remark,
        "correction": round(pool.correction, 3),
    }
