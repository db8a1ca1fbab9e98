"""The law: how many workers each pool is to have, decided every few seconds. Pure: signals and memory in, decision out.

1. For each pool the forecast and the timing model propose a number (``demand``), and the measured latency proposes one
   (``proposal.Reading``). The greater one counts, within the bounds of the pool.
2. The proposals are fitted into the budget of devices (``arbiter``).
3. A pool that needs more keeps workers that drain; then it takes a worker of the other pool, if that one can spare it; then
   workers are added (``arbiter``). Workers that start are counted. One that starts for too long is given up.
4. A pool shrinks by one worker at a time, to a number that has sufficed for a while.
5. A pool has one change at a time. Without signals nothing changes.
"""

from dataclasses import replace

from autoscaler.arbiter import Arbiter
from autoscaler.decision import Decision, PoolDecision
from autoscaler.demand import demand
from autoscaler.memory import Memory
from autoscaler.policy import ScalingPolicy
from autoscaler.proposal import propose
from autoscaler.signals import POOLS, Signals
from autoscaler.timing_model import TimingModel, with_sizes
from contract.scaling import ScalingReason

_BACKLOG_SECONDS = 30.0
"""The time in which requests that wait already are to be served, beside those that arrive."""


def decide(
    policy: ScalingPolicy, timing: TimingModel, memory: Memory, signals: Signals
) -> tuple[Decision, Memory]:
    """Decide what to do now. Returns the decision and the memory for the next call.

    policy: what the operator has decided. timing: the model of the workers, or a guess. The caller carries the orders out,
    in their order, and calls again after a few seconds whether it could or not: what is present then counts.
    """
    load = signals.load
    if load is None:
        return _hold(memory, signals)
    prefill_size = policy.prefill.data_parallel_size
    decode_size = policy.decode.data_parallel_size
    # The times, and these sizes, are those of one rank of a data-parallel group: each has its own requests.
    timing = with_sizes(timing, signals.decode, decode_size)  # a guess has neither the batch nor the KV pool
    start_seconds = signals.start_seconds or timing.start_seconds
    answers_each = signals.decode.num_in_flight / (decode_size * max(1, signals.decode.num_ready))
    forecast = memory.forecast.with_reading(signals.time, load.arrival_rate)
    corrections = memory.corrections.with_reading(timing, load, answers_each)
    expected = forecast.at(signals.time, start_seconds).with_backlog(load.num_waiting / _BACKLOG_SECONDS)
    of_ranks = demand(timing, policy.goals, load, expected, corrections)
    needed = of_ranks.in_groups(prefill_size, decode_size)
    longest_start = policy.damping.forgotten_after * max(start_seconds, timing.start_seconds)
    # The first ordered workers start under the load that has ordered them, and no start under load was measured yet.
    if not signals.num_starts:
        longest_start = max(longest_start, policy.damping.first_start)
    proposals = {role: propose(policy, memory, signals, needed, role, longest_start) for role in POOLS}
    # A pool that others have changed, or that was not seen, must suffice anew for a while before it shrinks.
    is_steady = memory.steady_since is not None and all(
        one.memory.expected in (None, one.present) for one in proposals.values()
    )
    memory = replace(
        memory,
        forecast=forecast,
        corrections=corrections,
        steady_since=memory.steady_since if is_steady else signals.time,
    )
    return Arbiter(policy, memory, signals.time, proposals).decide(expected.rate)


def _hold(memory: Memory, signals: Signals) -> tuple[Decision, Memory]:
    """Change nothing, and begin every wait anew when there are signals again."""
    pools = {}
    for role in POOLS:
        present = signals.pool(role).num_ready + len(signals.pool(role).starting_ages)
        pools[role] = PoolDecision(
            present=present,
            desired=present,
            proposed=present,
            needed=present,
            reason=ScalingReason.NO_SIGNALS,
            remark="routers or launcher do not answer",
        )
    memory = replace(
        memory,
        prefill=memory.prefill.interrupted(),
        decode=memory.decode.interrupted(),
        flips=memory.flips.with_candidate(None),
        steady_since=None,
    )
    return Decision(time=signals.time, pools=pools), memory
