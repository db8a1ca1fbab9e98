"""Random schedules through worlds that are too large to be exhausted."""

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.protocol.chart import draw
from tests.protocol.explorer import Findings
from tests.protocol.machine import LiveMachine
from tests.protocol.scenario import Scenario
from tests.protocol.sink import LawBrokenError
from tests.protocol.world import Action, World
from tests.protocol.world_rules import WorldRules

MAX_STEPS = 2000
_DEADLINES = ("expire", "late", "overdue")
ALL_FAULTS = (
    "crash",
    "deaf",
    "drain",
    "cut",
    "repeat",
    "delay",
    "corrupt",
    "break",
    "sever",
    "spoil",
    "starve",
    "starve_read",
    "late",
    "doubt",
    "silence",
    "leave",
)


@dataclass
class WalkReport:
    """The results of some schedules. broken: a counter-example as a chart for each broken law (one walk, one law).

    num_moves: of answers, after which a token has come. rungs: a request's attempts. climbed: a fetch's, that had to read
    again; a schedule counts each way once.
    """

    seed: int
    num_schedules: int = 0
    num_steps: int = 0
    num_moves: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    rungs: Counter[str] = field(default_factory=Counter)
    climbed: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    cpu_seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return plain data."""
        counted = {
            name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()
        }
        return counted | {"is_clean": not self.broken}


class Walker:
    """Random walks through one scenario, each in a new world. fault_share: how often a fault strikes, 0..1."""

    def __init__(self, scenario: Scenario, seed: int, fault_share: float = 0.08) -> None:
        self._scenario, self._fault_share = scenario, fault_share
        self._random = random.Random(seed)
        self.report = WalkReport(seed)

    def walk(self, num_schedules: int) -> WalkReport:
        """Run schedules, each from the start until nothing more can happen."""
        began = time.process_time()
        for _ in range(num_schedules):
            self._walk_once()
            self.report.num_schedules += 1
        self.report.cpu_seconds += time.process_time() - began
        return self.report

    def _walk_once(self) -> None:
        rules, actions = WorldRules(self._scenario, LiveMachine), list[Action]()
        world, num_waits = rules.begin(), 0
        try:
            while not self._is_at_rest(rules, world):
                picked = self._pick(rules, world)
                num_waits = 0 if picked else num_waits + 1
                for action in picked or _next_deadlines(rules, world, num_waits):
                    actions.append(action)
                    world = rules.apply(world, action, is_fault=action[0] in self._scenario.faults)
                if len(actions) > MAX_STEPS:
                    raise LawBrokenError(f"nothing has come to rest after {MAX_STEPS} steps")
        except LawBrokenError as error:
            self.report.broken.append(replayed(self._scenario, actions, str(error)))
        self.report.num_steps += len(actions)
        self.report.faults.update(action[0] for action in actions if action[0] in self._scenario.faults)
        self.report.climbed.update(" ".join(rungs) for rungs in rules.sink.climbed if rungs)
        for request in rules.routers.states[world.router].requests:
            self.report.endings[str(request.ended)] += 1
            self.report.rungs[" ".join(request.rungs)] += 1
            self.report.num_moves += request.num_moved

    def _pick(self, rules: WorldRules, world: World) -> list[Action]:
        """Choose the next action; None if only a deadline is left."""
        faults = list(rules.faults(world)) if self._random.random() < self._fault_share else []
        if faults:
            kind = self._random.choice(sorted({fault[0] for fault in faults}))
            return [self._random.choice([fault for fault in faults if fault[0] == kind])]
        progress = list(rules.progress(world))
        return [self._random.choice(progress)] if progress else []

    def _is_at_rest(self, rules: WorldRules, world: World) -> bool:
        """Return whether nothing more can happen. Raises LawBrokenError if something is left that should not be."""
        if next(rules.progress(world), None) is not None:
            return False
        left = rules.what_is_left(world)
        if left and world.num_faults == self._scenario.num_faults:
            raise LawBrokenError("without any fault only a deadline ends this: " + "; ".join(left))
        return not left


def _next_deadlines(rules: WorldRules, world: World, num_waits: int) -> list[Action]:
    """Return the deadlines of the next kind, after so many kinds in a row that changed nothing."""
    if num_waits > len(_DEADLINES):
        raise LawBrokenError("nothing ends this: " + "; ".join(rules.what_is_left(world)))
    return [action for action in rules.time(world) if action[0] == _DEADLINES[num_waits - 1]]


def replayed(scenario: Scenario, actions: list[Action], law: str) -> str:
    """Return the chart of a schedule that broke ``law``."""
    rules = WorldRules(scenario)
    findings, world = Findings(scenario, broken=law), rules.begin()
    for action in actions:
        try:
            after = rules.apply(world, action, is_fault=action[0] in scenario.faults)
        except LawBrokenError:
            findings.steps.append((world, action, None))
            break
        findings.steps.append((world, action, after))
        world = after
    return draw(findings, rules)


def run_walks(scenarios: Sequence[Scenario], num_schedules: int, seed: int) -> dict[str, Any]:
    """Run ``num_schedules`` random schedules, divided among the scenarios; return plain data with a chart of what broke.

    The same numbers give the same schedules again.
    """
    share = -(-num_schedules // len(scenarios))
    reports = {scenario.name: Walker(scenario, seed).walk(share) for scenario in scenarios}
    return {
        "seed": seed,
        "num_schedules": sum(report.num_schedules for report in reports.values()),
        "num_moves": sum(report.num_moves for report in reports.values()),
        "is_clean": not any(report.broken for report in reports.values()),
        "scenarios": {name: report.as_dict() for name, report in reports.items()},
    }
