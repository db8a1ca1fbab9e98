"""Shares devices between two pools: the budget, and when a worker changes its role instead of a worker being added."""

from collections.abc import Mapping
from dataclasses import dataclass

from autoscaler.policy import ScalingPolicy
from autoscaler.signals import POOLS
from contract.identity import Role

OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


def pressure(needed: float, number: int) -> float:
    """Return the workers that a pool needs as a multiple of those that it has; an empty pool counts as a tenth of one."""
    return needed / max(number, 0.1)


def within_budget(
    policy: ScalingPolicy, numbers: Mapping[Role, int], needed: Mapping[Role, float]
) -> dict[Role, int]:
    """Return the numbers, lowered until they fit the budget: the pool with the greatest pressure gets the next device."""
    wanted = dict(numbers)
    if policy.budget is None or policy.num_devices(wanted) <= policy.budget:
        return wanted
    given = {role: min(wanted[role], policy.bounds(role).least) for role in POOLS}
    while growing := [
        role
        for role in POOLS
        if given[role] < wanted[role]
        and policy.num_devices({**given, role: given[role] + 1}) <= policy.budget
    ]:
        neediest = max(growing, key=lambda role: pressure(needed[role], given[role]))
        given[neediest] += 1
    return given


@dataclass(frozen=True, kw_only=True)
class FlipChoice:
    """A worker of pool ``source`` could serve the other pool. costs: the pressure of ``source`` afterwards."""

    source: Role
    costs: float

    @property
    def target(self) -> Role:
        """The pool that gains a worker."""
        return OTHER[self.source]


def best_flip(
    policy: ScalingPolicy,
    present: Mapping[Role, int],
    wanted: Mapping[Role, int],
    needed: Mapping[Role, float],
) -> FlipChoice | None:
    """Return the flip that lowers the greatest pressure by ``flip_gain``, into a pool that needs more workers.

    None if there is none, if it leaves the bounds, or if a worker of one pool cannot take the place of one of the other.
    """
    for target in POOLS:
        source = OTHER[target]
        if wanted[target] <= present[target] or policy.prefill.devices != policy.decode.devices:
            continue
        after = {source: present[source] - 1, target: present[target] + 1}
        if after[source] < policy.bounds(source).least or after[target] > policy.bounds(target).most:
            continue
        before = max(pressure(needed[role], present[role]) for role in POOLS)
        costs = pressure(needed[source], after[source])
        if max(costs, pressure(needed[target], after[target])) <= (1.0 - policy.damping.flip_gain) * before:
            return FlipChoice(source=source, costs=costs)
    return None
