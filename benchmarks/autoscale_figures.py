"""The figures of ``benchmarks.autoscale_demo``: what happened, what the simulation of the same load does, and the table."""

import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import msgspec

from autoscaler.signals import POOLS
from benchmarks.autoscale_plan import Plan, simulate
from benchmarks.autoscale_run import Recording
from benchmarks.facts import command_line
from benchmarks.simulation.measures import quantile
from contract.identity import Role

_LEAST_ATTAINMENT = 0.95
_MOST_SHARE = 0.7
_MOST_TURNS = 2
_SIMULATION_ERROR = 0.15


def figures_of(plan: Plan, recording: Recording) -> dict[str, Any]:
    """Return the figures of a run, and those of its simulation."""
    seconds = plan.seconds
    hours = {role: recording.worker_hours(role, seconds) for role in POOLS}
    most = {role: recording.most(role) for role in POOLS}
    fixed_hours = sum(most.values()) * seconds / 3600.0
    begins = {phase.name: begin for phase, begin in zip(plan.phases, plan.bounds[:-1], strict=True)}
    simulation = simulated(plan, most)
    found = {
        "command": command_line("benchmarks.autoscale_demo"),
        "model": plan.model,
        "timing": msgspec.to_builtins(plan.timing),
        "goals_ms": {"ttft": 1e3 * plan.goals.ttft, "itl": 1e3 * plan.goals.itl},
        "load_average_15_minutes": round(os.getloadavg()[2], 2),
        "phases": [asdict(phase) for phase in plan.phases],
        "requests": len(plan.load),
        "answers": len(recording.answers),
        "failed": len(recording.errors),
        "errors": recording.errors[:5],
        "lists_not_read": recording.num_unread,
        "attainment": round(recording.attainment(plan.goals), 4),
        "by_phase": by_phase(plan, recording),
        "worker_hours": {role.value: round(number, 4) for role, number in hours.items()},
        "most_workers": {role.value: number for role, number in most.items()},
        "share_of_fixed_hours": round(sum(hours.values()) / fixed_hours, 3) if fixed_hours else None,
        "changes_of_load": {role.value: plan.num_changes(role) for role in POOLS},
        "turns": {role.value: turns([one.desired[role] for one in recording.samples]) for role in POOLS},
        "start_seconds": recording.starts(),
        "seconds_from_spike_to_worker": recording.seconds_to_grow(
            Role.PREFILL, begins.get("spike", math.inf)
        ),
        "flips": recording.num_flips,
        "decisions": recording.decisions,
        "simulated": simulation,
        "samples": _samples(plan, recording),
    }
    found["over_simulated"] = _over_simulated(found)
    found["checks"] = checks(found)
    return found


def by_phase(plan: Plan, recording: Recording) -> dict[str, Any]:
    """Return for each phase the shares of its answers that met each goal, and quantiles of latencies in milliseconds."""
    found: dict[str, Any] = {}
    for phase, (begin, end) in zip(plan.phases, pairwise(plan.bounds), strict=True):
        answers = [one for one in recording.answers if begin <= one.sent - recording.begin < end]
        first = [one.ttft for one in answers]
        later = [one.tpot for one in answers]
        found[phase.name] = {
            "answers": len(answers),
            "ttft": _latency(first, plan.goals.ttft),
            "tpot": _latency(later, plan.goals.itl),
        }
    return found


def _latency(seconds: Sequence[float], goal: float) -> dict[str, float | None]:
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    quantiles = {name: quantile([(one, 1.0) for one in seconds], share) for name, share in shares.items()}
    met = sum(one <= goal for one in seconds) / max(1, len(seconds))
    return {
        "attainment": round(met, 4),
        **{name: None if value is None else round(1e3 * value, 1) for name, value in quantiles.items()},
    }


def turns(numbers: Sequence[int | None]) -> int:
    """Return how often a number has begun to grow after it fell, or to fall after it grew."""
    changes = [after > before for before, after in pairwise(known(numbers)) if after != before]
    return sum(one is not other for one, other in pairwise(changes))


def known(numbers: Sequence[int | None]) -> list[int]:
    """Return the numbers that are not None."""
    return [number for number in numbers if number is not None]


def simulated(plan: Plan, most: dict[Role, int]) -> dict[str, Any]:
    """Simulate the same load with the same law, and with fixed pools of the sizes that were the greatest.

    desired: (time, number) of each pool, at each change.
    """
    scaled = simulate(plan, dict.fromkeys(POOLS, 1))
    desired = {role.value: numbers for role, numbers in scaled.desired.items()}
    return {
        "scaled": {**scaled.as_dict(), "desired": desired},
        "fixed": simulate(plan, most, is_fixed=True).as_dict(),
    }


def checks(figures: dict[str, Any]) -> dict[str, bool]:
    """Return which of the goals of the demo were met."""
    share = figures["share_of_fixed_hours"]
    return {
        "nothing failed": figures["failed"] == 0 and figures["answers"] == figures["requests"],
        "attainment": figures["attainment"] >= _LEAST_ATTAINMENT,
        "worker-hours": share is not None and share <= _MOST_SHARE,
        "turns": all(
            number <= _MOST_TURNS * max(1, figures["changes_of_load"][pool])
            for pool, number in figures["turns"].items()
        ),
        "simulation": all(
            abs(ratio - 1.0) <= _SIMULATION_ERROR for ratio in figures["over_simulated"].values()
        ),
    }


def _over_simulated(figures: dict[str, Any]) -> dict[str, float]:
    """Return the figures of the run as multiples of those of the simulation."""
    scaled = figures["simulated"]["scaled"]
    hours = sum(scaled["worker_hours"].values())
    return {
        "worker_hours": round(sum(figures["worker_hours"].values()) / hours, 3),
        "attainment": round(figures["attainment"] / max(scaled["attainment"], 1e-9), 3),
    }


def _samples(plan: Plan, recording: Recording) -> dict[str, Any]:
    samples = recording.samples
    pools = {
        role.value: {
            "serving": [one.serving[role] for one in samples],
            "desired": [one.desired[role] for one in samples],
        }
        for role in POOLS
    }
    return {
        "time": [round(one.time, 1) for one in samples],
        "waiting": [one.num_waiting for one in samples],
        "arrivals": [round(one.time, 1) for one in plan.load],
        **pools,
    }


def table(figures: dict[str, Any]) -> str:
    """Return the Markdown table of a run, beside its simulation and the goals."""
    scaled = figures["simulated"]["scaled"]
    fixed = figures["simulated"]["fixed"]
    hours = sum(figures["worker_hours"].values())
    fixed_hours = sum(fixed["worker_hours"].values())
    scaled_hours = sum(scaled["worker_hours"].values())
    over = figures["over_simulated"]
    goals = figures["goals_ms"]
    rows = [
        ("", "service", "simulation", "goal"),
        ("--", "--", "--", "--"),
        (
            "requests, of which failed",
            f"{figures['requests']}, {figures['failed']}",
            f"{scaled['requests']}, 0",
            "0",
        ),
        (
            f"within {goals['ttft']:.0f} ms to the first token and {goals['itl']:.0f} ms a token",
            f"{figures['attainment']:.1%}",
            f"{scaled['attainment']:.1%}; {fixed['attainment']:.1%} with fixed pools",
            f"{_LEAST_ATTAINMENT:.0%}",
        ),
        (
            "worker-hours, and as a share of fixed pools of the greatest sizes",
            f"{hours:.3f}, {figures['share_of_fixed_hours']:.2f}",
            f"{scaled_hours:.3f}, {scaled_hours / fixed_hours:.2f}",
            f"{_MOST_SHARE:.2f}",
        ),
        (
            "service over simulation: worker-hours, attainment",
            f"{over['worker_hours']:.2f}, {over['attainment']:.2f}",
            "",
            f"within {_SIMULATION_ERROR:.0%}",
        ),
        *(
            (
                f"{pool}: changes of direction, for {number} real changes of the load",
                str(figures["turns"][pool]),
                str(scaled["turns"][pool]),
                f"{_MOST_TURNS * max(1, number)}",
            )
            for pool, number in figures["changes_of_load"].items()
        ),
        ("flips", str(figures["flips"]), "", ""),
        ("from the spike to a worker more, s", _seconds(figures["seconds_from_spike_to_worker"]), "", ""),
        ("starts, s", ", ".join(f"{one:.0f}" for one in figures["start_seconds"]) or "none", "", ""),
    ]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    load = f"Load average of the 15 minutes: {figures['load_average_15_minutes']:.1f}."
    picture = (
        "\n\n![load and workers](../benchmarks/results/autoscale_demo.png)"
        if figures.get("has_picture")
        else ""
    )
    return "\n".join(lines) + f"\n\n{load}{picture}"


def _seconds(number: float | None) -> str:
    return "-" if number is None else f"{number:.0f}"
