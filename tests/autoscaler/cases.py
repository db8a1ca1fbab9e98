"""A small model of times, policies and signals for the tests of the law."""

from dataclasses import replace
from typing import Any

from autoscaler.decision import Decision
from autoscaler.law import decide
from autoscaler.memory import Memory
from autoscaler.policy import Goals, PoolBounds, ScalingPolicy
from autoscaler.signals import LoadSignals, PoolSignals, Signals
from autoscaler.timing_model import PrefillTiming, StepTiming, TimingModel, TransferTiming
from benchmarks.simulation.load import Arrival
from benchmarks.simulation.report import Report
from benchmarks.simulation.run import Scenario, Simulation
from contract.identity import Role

P, D = Role.PREFILL, Role.DECODE
GOALS = Goals(ttft=1.5, itl=0.04)
TIMING = TimingModel(
    description="an example: a prompt of 600 tokens takes 0.27 s, a step of 30 answers 38 ms",
    prefill=PrefillTiming(base_seconds=0.02, seconds_per_token=4e-4, seconds_per_token_squared=2e-8),
    decode=(StepTiming(base_seconds=0.012, seconds_per_context_token=4e-7, seconds_per_answer=6e-4),),
    transfer=TransferTiming(base_seconds=0.005, seconds_per_token=1e-6),
    kv_tokens=60_000,
    max_answers=64,
    start_seconds=20.0,
)
POLICY = ScalingPolicy(prefill=PoolBounds(most=8), decode=PoolBounds(most=8), goals=GOALS)
QUIET = LoadSignals(
    arrival_rate=1.0,
    prompt_tokens=600.0,
    uncached_prompt_tokens=600.0,
    uncached_prompt_tokens_p90=1300.0,
    answer_tokens=120.0,
    ttft_p90=0.6,
    itl_p90=0.015,
)
"""A load that one worker of each pool serves."""


def signals(
    time: float, prefill: PoolSignals, decode: PoolSignals, load: LoadSignals | None = QUIET
) -> Signals:
    """Return signals of a service in which workers have been started before."""
    return Signals(time=time, prefill=prefill, decode=decode, load=load, num_starts=1)


def ready(number: int, in_flight: float = 0.0) -> PoolSignals:
    return PoolSignals(num_ready=number, num_in_flight=in_flight, max_in_flight=64 * number)


class Law:
    """Runs the law every five seconds and keeps its memory."""

    def __init__(self, policy: ScalingPolicy = POLICY, time: float = 0.0) -> None:
        self.policy = policy
        self.time = time
        self.memory = Memory()

    def run(
        self,
        prefill: PoolSignals,
        decode: PoolSignals,
        load: LoadSignals | None = QUIET,
        seconds: float = 5.0,
    ) -> list[Decision]:
        """Give the same signals for some time; return the decisions."""
        decisions = []
        for _ in range(round(seconds / 5.0)):
            self.time += 5.0
            decision, self.memory = decide(
                self.policy, TIMING, self.memory, signals(self.time, prefill, decode, load)
            )
            decisions.append(decision)
        return decisions


def simulate(
    arrivals: list[Arrival], duration: float, policy: ScalingPolicy = POLICY, **changes: Any
) -> Report:
    """Simulate a service that begins with the least workers."""
    scenario = Scenario(
        policy=policy,
        truth=TIMING,
        arrivals=arrivals,
        initial={role: policy.bounds(role).least for role in (P, D)},
        duration=duration,
    )
    return Simulation(replace(scenario, **changes)).run()
