"""The last decision of the autoscaler, which every router publishes, and the lease of the one that may decide."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from contract.identity import Role
from contract.scaling import PoolScaling, ScalingLease, ScalingReport
from router.telemetry.metrics import ScalingMetrics

_VALID_SECONDS = 60.0
"""A decision that is older is not published: the autoscaler decides every few seconds."""
_GONE_SECONDS = 3600.0
"""After this time without a decision the service counts as one without an autoscaler."""


class ScalingReports:
    """Owns the last report. metrics: counts all of them. clock: seconds, monotonic. For one thread."""

    def __init__(self, metrics: ScalingMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._last: tuple[float, ScalingReport] | None = None

    def record(self, report: ScalingReport) -> None:
        """Keep a decision as the last one, and count it."""
        self._last = (self._clock(), report)
        for role, decision in _pools(report).items():
            self._metrics.on_decision(role, decision)

    def wakes(self, roles: frozenset[Role]) -> bool:
        """Return True if an autoscaler starts a worker of each of these roles when a request waits for one."""
        pools = self._pools()
        # a pool that may have no worker is started for a request that waits, so the request need not fail
        return bool(roles) and all(role in pools and pools[role].least == 0 for role in roles)

    def publish(self) -> None:
        """Set the gauges to the values of this moment."""
        # an old decision is not shown as the present one: its autoscaler has stopped
        is_valid = self._last is not None and bool(self._pools())
        num_restarts = self._last[1].num_restarts if self._last is not None and is_valid else None
        self._metrics.set(self._pools(), self._age(), num_restarts)

    def facts(self) -> dict[str, dict[str, Any]]:
        """Return the decision as plain data, by role; empty if there is none, or only an old one."""
        num_restarts = self._last[1].num_restarts if self._last is not None else 0
        return {
            role.value: {
                "desired_workers": decision.desired,
                "scaling_reason": decision.reason.value,
                "scaling_held_workers": decision.held,
                "scaling_held_by": decision.held_by and decision.held_by.value,
                "autoscaler_restarts": num_restarts,
            }
            for role, decision in self._pools().items()
        }

    def _pools(self) -> Mapping[Role, PoolScaling]:
        age = self._age()
        if self._last is None or age is None or age > _VALID_SECONDS:
            return {}
        return _pools(self._last[1])

    def _age(self) -> float | None:
        if self._last is None:
            return None
        age = self._clock() - self._last[0]
        return age if age <= _GONE_SECONDS else None


class ScalingLeases:
    """Owns the lease of the one autoscaler that may scale the service. metrics: counts the refusals of others.

    clock: seconds, monotonic. For one thread.
    """

    def __init__(self, metrics: ScalingMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._holder: str | None = None
        self._until = float("-inf")

    def ask(self, wanted: ScalingLease) -> ScalingLease:
        """Grant the lease, prolong it or take it back; return who has it. It is refused while another one has it."""
        now = self._clock()
        # a holder that died gives nothing back; its lease ends by itself
        is_free = self._holder is None or now >= self._until
        if not is_free and self._holder is not None and self._holder != wanted.holder:
            if wanted.seconds:
                self._metrics.on_lease_refused()
            return ScalingLease(holder=self._holder, seconds=self._until - now)
        self._holder = wanted.holder if wanted.seconds else None
        self._until = now + wanted.seconds
        return wanted


def _pools(report: ScalingReport) -> Mapping[Role, PoolScaling]:
    return {Role.PREFILL: report.prefill, Role.DECODE: report.decode}
