"""Simulates the autoscaler on a load, beside fixed pools for the peak, and prints its decisions and the figures of both.

    python -m benchmarks.autoscaling --load day
    python -m benchmarks.autoscaling --trace AzureLLMInferenceTrace_code.csv --timing timing.json --ttft-goal-ms 2000

Nothing is measured here: every figure follows from the model of times.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from autoscaler.policy import Goals, PoolBounds, ScalingPolicy
from autoscaler.timing_model import TimingModel, read_timing
from benchmarks.simulation.changes import load_levels, num_changes, spans
from benchmarks.simulation.load import (
    DAY_SECONDS,
    Arrival,
    Lengths,
    arrivals,
    azure_trace,
    day,
    ramp,
    scaled,
    steps,
)
from benchmarks.simulation.report import Report
from benchmarks.simulation.run import Scenario, Simulation
from benchmarks.simulation.windows import Draw, arrivals_in, lengths_of, read_windows
from contract.identity import Role
from tests.autoscaler.cases import TIMING

LENGTHS = Lengths()
LOADS: dict[str, Callable[[int], tuple[list[Arrival], float]]] = {
    "step": lambda seed: (arrivals(steps((0, 2), (600, 8), (1500, 2)), 8, 2700, LENGTHS, seed), 2700.0),
    "ramp": lambda seed: (arrivals(ramp(300, 1500, 1, 9), 9, 2100, LENGTHS, seed), 2100.0),
    "spike": lambda seed: (arrivals(steps((0, 2), (600, 8), (780, 2)), 8, 1800, LENGTHS, seed), 1800.0),
    "day": lambda seed: (arrivals(day(0.05, 1.5), 1.5, 86_400, LENGTHS, seed), 86_400.0),
}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--load", choices=sorted(LOADS), default="step")
    parser.add_argument("--trace", type=Path, help="trace in the form of Azure's of 2023, instead of --load")
    parser.add_argument(
        "--windows", type=Path, help="rates of days in ServeGen's form; --trace has the lengths"
    )
    parser.add_argument("--day", type=int, default=0, help="day of the windows, from 0 on")
    parser.add_argument(
        "--mean-rate", type=float, default=1.0, help="requests per second of the windows' day"
    )
    parser.add_argument("--poisson", action="store_true", help="take only the rates from the windows")
    parser.add_argument("--time-scale", type=float, default=1.0, help="stretches the trace")
    parser.add_argument("--token-scale", type=float, default=1.0, help="multiplies the tokens of the trace")
    parser.add_argument("--timing", type=Path, help="timing file; an example without it")
    parser.add_argument("--most", type=int, default=8, help="bound of each pool")
    parser.add_argument("--budget", type=int, help="devices of both pools together")
    parser.add_argument("--ttft-goal-ms", type=float, default=1500.0)
    parser.add_argument("--itl-goal-ms", type=float, default=40.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    timing = read_timing(arguments.timing) if arguments.timing else TIMING
    policy = ScalingPolicy(
        prefill=PoolBounds(most=arguments.most),
        decode=PoolBounds(most=arguments.most),
        goals=Goals(ttft=arguments.ttft_goal_ms / 1000, itl=arguments.itl_goal_ms / 1000),
        budget=arguments.budget,
    )
    if arguments.windows:
        load = _windowed(arguments)
        duration = DAY_SECONDS
    elif arguments.trace:
        load = scaled(azure_trace(arguments.trace), time=arguments.time_scale, tokens=arguments.token_scale)
        duration = load[-1].time + 60.0
    else:
        load, duration = LOADS[arguments.load](arguments.seed)
    print_comparison(policy, timing, load, duration)


def _windowed(arguments: argparse.Namespace) -> list[Arrival]:
    """Return a day with the rates of the windows, and with the lengths of the trace if there is one."""
    draw: Draw = LENGTHS.sample
    if arguments.trace:
        draw = lengths_of(scaled(azure_trace(arguments.trace), tokens=arguments.token_scale))
    windows = read_windows(arguments.windows, arguments.day)
    return arrivals_in(windows, arguments.mean_rate, draw, arguments.seed, is_poisson=arguments.poisson)


def print_comparison(
    policy: ScalingPolicy, timing: TimingModel, load: Sequence[Arrival], duration: float
) -> None:
    """Print the decisions that change something, and the figures of scaled and of fixed pools.

    The real changes of the load are counted in means of a start and the stabilization: what ends sooner is over before a
    pool has followed it there and back.
    """
    report = _run(policy, timing, load, duration, {Role.PREFILL: 1, Role.DECODE: 1}, is_fixed=False)
    fixed = _run(policy, timing, load, duration, report.most, is_fixed=True)
    for decision in report.decisions:
        if decision.orders:
            print(f"{decision.time:8.0f} s  {decision.line}")
    share = report.total_hours / fixed.total_hours
    bounds = spans(duration, timing.start_seconds + policy.damping.stabilization)
    levels = load_levels(load, bounds, timing, policy.goals)
    figures = {
        "scaled": report.as_dict(),
        "fixed": fixed.as_dict(),
        "share_of_hours": round(share, 3),
        "changes_of_load": {role.value: num_changes(levels[role]) for role in levels},
    }
    print(json.dumps(figures, indent=2))


def _run(
    policy: ScalingPolicy,
    timing: TimingModel,
    load: Sequence[Arrival],
    duration: float,
    initial: dict[Role, int],
    *,
    is_fixed: bool,
) -> Report:
    scenario = Scenario(
        policy=policy, truth=timing, arrivals=load, initial=initial, duration=duration, is_fixed=is_fixed
    )
    return Simulation(scenario).run()


if __name__ == "__main__":
    main()
