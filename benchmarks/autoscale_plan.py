"""The plan of ``benchmarks.autoscale_demo``: the load, the service that gets it, and the simulation of both."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from autoscaler.policy import Goals
from autoscaler.scaled_cluster import policy_of
from autoscaler.timing_model import TimingModel, read_timing
from benchmarks.autoscale_load import Phase, arrivals_of, goals_for
from benchmarks.autoscale_trace import read_trace
from benchmarks.simulation.changes import load_levels, num_changes
from benchmarks.simulation.load import Arrival
from benchmarks.simulation.report import Report
from benchmarks.simulation.run import Scenario, Simulation
from contract.identity import Role
from launch.machine_settings import UpSettings

MAX_SEQUENCES = 8
"""Requests that a worker has at once: with few of them the decode pool of a small model needs two workers too."""
STEP_TOKENS = 512
"""Tokens that a worker computes at once: more are not faster on a core, and make the first of several prompts wait."""
KV_BYTES = 64 * 2**20
"""More than these requests need; the default takes seconds of each start."""

WORKER_SETTINGS = ("num_threads", "max_num_seqs", "max_num_batched_tokens", "kv_cache_bytes")
"""The settings of a worker that the plan gives."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run. load: the requests of all ``phases``. timing_file: has ``timing``."""

    model: str
    timing: TimingModel
    timing_file: Path
    goals: Goals
    phases: Sequence[Phase]
    load: Sequence[Arrival]
    seed: int

    @property
    def seconds(self) -> float:
        """The length of the load."""
        return sum(phase.seconds for phase in self.phases)

    @property
    def settings(self) -> UpSettings:
        """The settings of the service. Their bounds, budget and goals are also those of the simulation."""
        return UpSettings(
            model=self.model,
            http="127.0.0.1:0",
            grpc="127.0.0.1:0",
            autoscale=True,
            prefill=1,
            max_prefill=2,
            decode=1,
            max_decode=2,
            budget=3,
            timing=self.timing_file,
            ttft_goal_ms=1e3 * self.goals.ttft,
            itl_goal_ms=1e3 * self.goals.itl,
            num_threads=1,
            max_num_seqs=MAX_SEQUENCES,
            max_num_batched_tokens=STEP_TOKENS,
            kv_cache_bytes=KV_BYTES,
        )

    @property
    def bounds(self) -> list[float]:
        """The times between the phases, the begin and the end included."""
        return [0.0, *accumulate(phase.seconds for phase in self.phases)]

    def num_changes(self, role: Role) -> int:
        """Return how often the load of a pool really changes from one phase to another."""
        return num_changes(load_levels(self.load, self.bounds, self.timing, self.goals)[role])


def planned(timing_file: Path, phases: Sequence[Phase], *, model: str, trace: Path | None, seed: int) -> Plan:
    """Return the plan for a machine with this timing file. trace: a whole trace; None: the committed windows of it.

    Raises SettingError if a file cannot be used.
    """
    timing = read_timing(timing_file)
    requests = read_trace(trace)
    goals = goals_for(timing, requests)
    return Plan(
        model=model,
        timing=timing,
        timing_file=timing_file,
        goals=goals,
        phases=phases,
        load=arrivals_of(phases, requests, timing, goals, seed),
        seed=seed,
    )


def simulate(plan: Plan, initial: dict[Role, int], *, is_fixed: bool = False) -> Report:
    """Simulate the load on pools that begin with ``initial``."""
    scenario = Scenario(
        policy=policy_of(plan.settings),
        truth=plan.timing,
        arrivals=plan.load,
        initial=initial,
        duration=plan.seconds,
        is_fixed=is_fixed,
    )
    return Simulation(scenario).run()
