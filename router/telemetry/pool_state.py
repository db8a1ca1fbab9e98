"""The load of each pool, which is all workers of one role: what autoscalers read. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

from contract.identity import WORKER_ROLES, Role
from router.routing.views import is_full
from router.telemetry.goals import Goals
from router.workers.attached_worker import AttachedWorker
from router.workers.worker_facts import ShownState, state_of

UTILIZATION_GOAL = 0.85
"""The utilization at which the pressure of a pool is 1."""


@dataclass(frozen=True)
class RecentLatency:
    """The P90 of the last seconds; None without values."""

    ttft: float | None = None
    itl: float | None = None


@dataclass
class PoolState:
    """One pool. utilization: 0..1; None without a serving worker. backlog_seconds: median of its workers' queued prompts.

    has_room: a worker accepts another leg. wait_seconds: for which the oldest request has waited at the router for this
    pool to have room.
    """

    role: Role
    states: Counter[ShownState] = field(default_factory=Counter)
    utilization: float | None = None
    backlog_seconds: float = 0.0
    has_room: bool = False
    wait_seconds: float = 0.0

    @property
    def queue_seconds(self) -> float:
        """The seconds that a prompt waits for this pool now."""
        return self.backlog_seconds + self.wait_seconds

    def pressure(self, goals: Goals, recent: RecentLatency) -> float:
        """Return the load relative to the goals; 1 is at the goal. recent: only the parts that this pool decides."""
        latencies = ((recent.ttft, goals.ttft_seconds), (recent.itl, goals.itl_seconds))
        return max(
            (self.utilization or 0.0) / UTILIZATION_GOAL,
            self.queue_seconds / goals.ttft_seconds,
            *(value / goal for value, goal in latencies if value is not None),
        )


def pool_states(
    workers: Iterable[AttachedWorker], oldest_waits: Mapping[Role, float]
) -> dict[Role, PoolState]:
    """Return the state of every pool that has workers or should have some, by role.

    oldest_waits: seconds that the oldest request has waited at the router, by the roles that its legs need.
    """
    members: dict[Role, list[AttachedWorker]] = {role: [] for role in WORKER_ROLES}
    for worker in workers:
        members[worker.role].append(worker)
    # an empty pool is shown as well: an autoscaler that does not see it would not start its first worker
    needed = () if members[Role.AGGREGATED] else (Role.PREFILL, Role.DECODE)
    pools = {role: _state(role, found) for role, found in members.items() if found or role in needed}
    for role, pool in pools.items():
        # with room the wait has another reason, and more workers of this role would not shorten it
        if not pool.has_room:
            waits = oldest_waits.values() if role is Role.AGGREGATED else [oldest_waits.get(role, 0.0)]
            pool.wait_seconds = max(waits, default=0.0)
    return pools


@dataclass(frozen=True)
class PoolLoad:
    """The figures of one pool that are published. utilization: None without a serving worker."""

    role: Role
    states: Counter[ShownState]
    utilization: float | None
    queue_seconds: float
    pressure: float

    def as_dict(self) -> dict[str, float | None]:
        """Return the figures by the names of the metrics."""
        return {
            "num_workers": self.states.total(),
            "num_serving": self.states[ShownState.SERVING],
            "pool_utilization": self.utilization,
            "queue_seconds": self.queue_seconds,
            "scaling_pressure": self.pressure,
        }


def decided_by(role: Role, pools: Mapping[Role, PoolState], recent: RecentLatency) -> RecentLatency:
    """Return the parts of the recent latency that the workers of a role decide.

    First tokens that come late since requests wait for room to decode are no reason for more prefill workers.
    """
    decode = pools.get(Role.DECODE)
    waits_for_decode = role is Role.PREFILL and decode is not None and decode.wait_seconds > 0
    return RecentLatency(
        None if role is Role.DECODE or waits_for_decode else recent.ttft,
        None if role is Role.PREFILL else recent.itl,
    )


def _state(role: Role, workers: Iterable[AttachedWorker]) -> PoolState:
    pool = PoolState(role)
    used: list[float] = []
    backlogs: list[float] = []
    for worker in workers:
        state = state_of(worker)
        pool.states[state] += 1
        if state is ShownState.SERVING:
            capacity = worker.capacity
            credit = capacity.credit
            load = capacity.load
            shares = [load.kv_cache_usage]
            if capacity.waits_for_credit:  # other routers hold all of it
                shares.append(1.0)
            if credit.max_requests:
                shares.append(capacity.num_requests / credit.max_requests)
            if credit.max_tokens:
                shares.append(capacity.num_tokens / credit.max_tokens)
            # whatever runs out first keeps the next request away
            used.append(min(1.0, max(shares)))
            backlogs.append((load.queued_prompt_tokens or 0) * (load.prefill_seconds_per_token or 0.0))
            has_credit = (
                capacity.num_requests < credit.max_requests and capacity.num_tokens < credit.max_tokens
            )
            pool.has_room |= has_credit and not is_full(load.kv_cache_usage)
    if used:
        pool.utilization = sum(used) / len(used)
        pool.backlog_seconds = median(backlogs)  # a single worker may report anything
    return pool
