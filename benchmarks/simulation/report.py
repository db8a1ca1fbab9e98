"""The result of a simulation."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from autoscaler.decision import Decision
from autoscaler.policy import Goals
from autoscaler.signals import POOLS
from benchmarks.simulation.measures import quantile
from benchmarks.simulation.worker import SimulatedRequest
from contract.identity import Role


@dataclass(frozen=True, kw_only=True)
class Report:
    """The figures of one run.

    attainment: share of the requests that met both goals; one that has no answer has missed them. worker_hours: of workers
    that exist, by pool. most: the greatest number of workers of each pool. desired: (time, number) by pool, at each change.
    """

    num_requests: int
    num_answers: int
    attainment: float
    ttft_p90: float | None
    itl_p90: float | None
    worker_hours: dict[Role, float]
    most: dict[Role, int]
    desired: dict[Role, list[tuple[float, int]]]
    decisions: Sequence[Decision]

    @property
    def total_hours(self) -> float:
        """The worker-hours of both pools."""
        return sum(self.worker_hours.values())

    def num_turns(self, role: Role) -> int:
        """Return how often the desired number of a pool has begun to grow after it shrank, or to shrink after it grew."""
        directions = [after > before for (_, before), (_, after) in pairwise(self.desired[role])]
        return sum(one is not other for one, other in pairwise(directions))

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as plain data for JSON, without the decisions."""
        return {
            "requests": self.num_requests,
            "answers": self.num_answers,
            "attainment": round(self.attainment, 4),
            "ttft_p90_seconds": self.ttft_p90,
            "itl_p90_seconds": self.itl_p90,
            "worker_hours": {role.value: round(hours, 3) for role, hours in self.worker_hours.items()},
            "most_workers": {role.value: number for role, number in self.most.items()},
            "turns": {role.value: self.num_turns(role) for role in POOLS},
        }


def report_of(
    goals: Goals,
    duration: float,
    num_requests: int,
    requests: Sequence[SimulatedRequest],
    workers: Sequence[tuple[float, Role, int]],
    decisions: Sequence[Decision],
) -> Report:
    """Return the figures of a run. workers: (time, role, existing workers) at each change."""
    first_tokens = [one.first_token - one.arrival.time for one in requests if one.first_token is not None]
    gaps = [itl for one in requests if (itl := one.itl) is not None]
    num_good = sum(
        first <= goals.ttft and (one.itl or 0.0) <= goals.itl
        for one, first in zip(requests, first_tokens, strict=True)
    )
    return Report(
        num_requests=num_requests,
        num_answers=len(requests),
        attainment=num_good / num_requests if num_requests else 1.0,
        ttft_p90=quantile(((one, 1.0) for one in first_tokens), 0.9),
        itl_p90=quantile(((one, 1.0) for one in gaps), 0.9),
        worker_hours={role: _hours(role, workers, duration) for role in POOLS},
        most={role: max((number for _, of, number in workers if of is role), default=0) for role in POOLS},
        desired={role: _changes(role, decisions) for role in POOLS},
        decisions=decisions,
    )


def _hours(role: Role, workers: Sequence[tuple[float, Role, int]], duration: float) -> float:
    of_role = [(min(time, duration), number) for time, of, number in workers if of is role]
    spans = pairwise([*of_role, (duration, 0)])
    return sum(number * (end - start) for (start, number), (end, _) in spans) / 3600.0


def _changes(role: Role, decisions: Sequence[Decision]) -> list[tuple[float, int]]:
    found: list[tuple[float, int]] = []
    for decision in decisions:
        number = decision.pools[role].desired
        if not found or found[-1][1] != number:
            found.append((decision.time, number))
    return found
