"""Makes orders of the proposals of both pools, which share devices.

``within_budget`` fits two numbers into the budget, ``best_flip`` finds out whether a worker should change its role instead
of a worker being added, and ``Arbiter`` decides what is ordered now.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autoscaler.decision import Decision, Order, PoolDecision, Verb
from autoscaler.memory import Memory
from autoscaler.policy import ScalingPolicy
from autoscaler.proposal import CONFIRMATIONS, Proposal
from autoscaler.signals import POOLS
from contract.identity import Role
from contract.scaling import ScalingReason

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
    # Device by device, so that both pools come equally near to what they need however the budget divides.
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
        if wanted[target] <= present[target] or not policy.has_equal_workers:
            continue
        after = {source: present[source] - 1, target: present[target] + 1}
        if after[source] < policy.bounds(source).least or after[target] > policy.bounds(target).most:
            continue
        before = max(pressure(needed[role], present[role]) for role in POOLS)
        costs = pressure(needed[source], after[source])
        if max(costs, pressure(needed[target], after[target])) <= (1.0 - policy.damping.flip_gain) * before:
            return FlipChoice(source=source, costs=costs)
    return None


class Arbiter:
    """Decides one time, at ``now``. memory: with the readings of this decision, but for those in ``proposals``."""

    def __init__(
        self, policy: ScalingPolicy, memory: Memory, now: float, proposals: Mapping[Role, Proposal]
    ) -> None:
        self._policy = policy
        self._memory = memory
        self._now = now
        self._proposals = proposals
        self._needed = {role: proposal.needed for role, proposal in proposals.items()}
        self._present = {role: proposal.present for role, proposal in proposals.items()}
        self._wanted = self._fitted()
        existing = {role: proposal.num_existing for role, proposal in proposals.items()}
        self._room = None if policy.budget is None else policy.budget - policy.num_devices(existing)
        self._orders: list[Order] = []

    def decide(self, rate: float) -> tuple[Decision, Memory]:
        """Return the decision and the memory after it."""
        for role, proposal in self._proposals.items():
            if proposal.forgotten:
                self._orders.append(Order(Verb.FORGET, role, proposal.forgotten))
        choice = self._flip_choice()
        flips = self._memory.flips.with_candidate(choice.source if choice else None)
        if choice and flips.num_seen >= CONFIRMATIONS:
            # A flip changes both pools, and a pool has one change at a time: nothing else is ordered.
            flips = replace(flips, last_source=choice.source, last_at=self._now)
            self._orders.append(Order(Verb.FLIP, choice.source))
            remark = f"a flip leaves {choice.source.value} at {choice.costs:.1f}x"
            results = {
                choice.source: self._result(choice.source, -1, ScalingReason.FLIP, remark),
                choice.target: self._result(choice.target, 1, ScalingReason.FLIP, remark),
            }
        else:
            # The worker of a flip that still has to be confirmed is not added by a start in the meantime.
            awaited = choice.target if choice else None
            neediest_first = sorted(
                POOLS, key=lambda role: -pressure(self._needed[role], self._present[role])
            )
            results = {role: self._decide(role, int(role is awaited)) for role in neediest_first}
        decision = Decision(
            time=self._now,
            pools={role: results[role] for role in POOLS},
            orders=tuple(self._orders),
            rate=rate,
        )
        pools = {}
        for role, proposal in self._proposals.items():
            result = results[role]
            kept = proposal.memory.with_change(
                self._now, result.present, result.desired, self._policy.damping.stabilization
            )
            # What others do to the pool shows at the next decision: its number is then not the expected one.
            pools[role] = replace(kept, expected=result.desired)
        memory = replace(self._memory, prefill=pools[Role.PREFILL], decode=pools[Role.DECODE], flips=flips)
        return decision, memory

    def _fitted(self) -> dict[Role, int]:
        """Return the numbers that the pools get, as far as time and budget allow.

        The budget takes a worker away only if it is exceeded, or if the other pool lacks its least number.
        """
        wanted = {
            role: max(one.number, _shrunk(self._policy, self._memory, self._now, one))
            for role, one in self._proposals.items()
        }
        fitted = within_budget(self._policy, wanted, self._needed)
        policy = self._policy
        is_exceeded = policy.budget is not None and policy.num_devices(self._present) > policy.budget
        if is_exceeded or any(self._present[role] < policy.bounds(role).least for role in POOLS):
            return fitted
        return {role: max(fitted[role], min(wanted[role], self._present[role])) for role in POOLS}

    def _flip_choice(self) -> FlipChoice | None:
        """Return the flip that would help, if the source can spare a worker or none can be added instead."""
        # Its worker would leave one pool and reach the other while their numbers are uncertain.
        if any(proposal.is_changing for proposal in self._proposals.values()):
            return None
        choice = best_flip(self._policy, self._present, self._wanted, self._needed)
        if choice is None:
            return None
        memory = self._proposals[choice.source].memory
        was_needed = (
            memory.most_needed(self._now, self._policy.damping.stabilization) >= self._present[choice.source]
        )
        if (choice.costs > 1.0 or was_needed) and self._num_addable(choice.target) > 0:
            return None
        flips = self._memory.flips
        # Two pools that are both nearly full would otherwise give the same worker to each other again and again.
        is_opposite = flips.last_source is choice.target
        if is_opposite and self._now - flips.last_at < self._policy.damping.opposite_flip_interval:
            return None
        return choice

    def _decide(self, role: Role, num_awaited: int) -> PoolDecision:
        """Order what a pool needs. num_awaited: workers that it will get by a flip soon."""
        proposal = self._proposals[role]
        missing = self._wanted[role] - proposal.present
        if missing > 0:
            return self._grown(proposal, missing, num_awaited)
        if missing < 0:
            return self._smaller(proposal)
        if proposal.number > proposal.present:
            return self._result(role, 0, ScalingReason.BUDGET)
        if proposal.number < proposal.present:
            return self._result(role, 0, ScalingReason.STABILIZING)
        if proposal.forgotten:
            return self._result(role, 0, ScalingReason.FORGOTTEN)
        is_bounded = proposal.unbounded > proposal.number
        return self._result(role, 0, ScalingReason.BOUNDS if is_bounded else ScalingReason.STEADY)

    def _grown(self, proposal: Proposal, missing: int, num_awaited: int) -> PoolDecision:
        role = proposal.role
        if proposal.num_starting or proposal.workers.num_changing:
            return self._result(role, 0, ScalingReason.IN_FLIGHT)
        # A worker that still drains serves at once; one that is started takes its whole start.
        kept = min(missing, proposal.workers.num_keepable)
        if kept:
            self._orders.append(Order(Verb.KEEP, role, kept))
            return self._result(role, kept, proposal.reason)
        needed = missing - num_awaited
        added = min(needed, self._num_addable(role))
        if added > 0:
            self._orders.append(Order(Verb.ADD, role, added))
            if self._room is not None:
                self._room -= added * self._policy.bounds(role).devices
        reason = ScalingReason.FLIP if num_awaited and not needed else proposal.reason
        is_short = added < needed or self._wanted[role] < proposal.number
        return self._result(role, max(0, added), ScalingReason.BUDGET if is_short else reason)

    def _smaller(self, proposal: Proposal) -> PoolDecision:
        role = proposal.role
        if proposal.is_changing:
            return self._result(role, 0, ScalingReason.IN_FLIGHT)
        must_shrink = self._wanted[role] < min(proposal.number, proposal.present)
        is_beyond = proposal.present > self._policy.bounds(role).most
        # The effect of a removal shows in latencies only after a while; the budget cannot wait for it.
        is_early = self._now - proposal.memory.removed_at < self._policy.damping.removal_interval
        if is_early and not must_shrink:
            return self._result(role, 0, ScalingReason.STABILIZING)
        self._orders.append(Order(Verb.DRAIN, role))  # one at a time, however many are too many
        reason = (
            ScalingReason.BUDGET if must_shrink else ScalingReason.BOUNDS if is_beyond else proposal.reason
        )
        return self._result(role, -1, reason)

    def _num_addable(self, role: Role) -> int:
        """Return how many workers the budget and the bounds of a pool leave room for."""
        bounds = self._policy.bounds(role)
        within_bounds = max(0, bounds.most - self._proposals[role].num_existing)
        return (
            within_bounds if self._room is None else min(within_bounds, max(0, self._room) // bounds.devices)
        )

    def _result(self, role: Role, difference: int, reason: ScalingReason, remark: str = "") -> PoolDecision:
        proposal = self._proposals[role]
        return PoolDecision(
            present=proposal.present,
            desired=proposal.present + difference,
            proposed=proposal.number,
            needed=max(proposal.number, proposal.unbounded),
            reason=reason,
            forecast=proposal.forecast,
            reading=proposal.reading,
            remark=", ".join(one for one in (remark, proposal.remark) if one),
            correction=proposal.correction,
            is_correction_bounded=proposal.is_correction_bounded,
            least=self._policy.bounds(role).least,
        )


def _shrunk(policy: ScalingPolicy, memory: Memory, now: float, proposal: Proposal) -> int:
    """Return the number to which a pool may shrink: one that has sufficed for a while; else the present number."""
    since = memory.steady_since
    seconds = policy.damping.stabilization
    if since is None or now - since < seconds:
        return min(proposal.present, policy.bounds(proposal.role).most)
    return min(proposal.present, proposal.memory.most_needed(now, seconds))
