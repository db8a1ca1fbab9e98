"""A search of all reachable worlds, nearest first; it reports the first broken law and the way to it."""

import time
from array import array
from dataclasses import dataclass, field
from typing import Any

from tests.protocol.scenario import Scenario
from tests.protocol.sink import LawBrokenError
from tests.protocol.world import Action, World
from tests.protocol.world_rules import WorldRules


@dataclass
class Findings:
    """The results of an exploration. broken: the first broken law; steps: the shortest way to it.

    num_calls: different (state, call) of workers and router that production code answered. endings: how requests ended,
    with the rungs of the ladder that they took.
    """

    scenario: Scenario
    num_worlds: int = 0
    num_steps: int = 0
    num_quiet: int = 0
    num_calls: int = 0
    cpu_seconds: float = 0.0
    is_complete: bool = False
    broken: str | None = None
    steps: list[tuple[World, Action, World | None]] = field(default_factory=list)
    endings: set[tuple[str | None, tuple[str, ...]]] = field(default_factory=set)


class Explorer:
    """A breadth-first search, so that a counter-example is as short as possible."""

    def __init__(self, scenario: Scenario, max_worlds: int | None = None) -> None:
        self.rules = self.make_rules(scenario)
        self._max_worlds = max_worlds
        self._worlds: list[World] = []
        self._numbers: dict[World, int] = {}
        self._parents: list[tuple[int, Action]] = []
        self._edges = array("L")
        self._findings = Findings(scenario)

    def make_rules(self, scenario: Scenario) -> Any:
        """Return the rules of the scenario's worlds."""
        return WorldRules(scenario)

    def explore(self) -> Findings:
        """Run to exhaustion, to the first broken law, or to ``max_worlds``."""
        began = time.process_time()
        found = self._findings
        self._add(self.rules.begin(), -1, ())
        number = 0
        while number < len(self._worlds) and found.broken is None:
            if self._max_worlds is not None and len(self._worlds) > self._max_worlds:
                break
            self._expand(number)
            number += 1
        found.is_complete = found.broken is None and number == len(self._worlds)
        if found.is_complete:
            self._check_that_work_ends()
        found.num_worlds = len(self._worlds)
        found.num_calls = sum(machine.num_answers for machine in self.rules.machines)
        found.cpu_seconds = time.process_time() - began
        return found

    def _expand(self, number: int) -> None:
        world, rules = self._worlds[number], self.rules
        is_quiet = True
        for action in rules.progress(world):
            after = self._try(number, action, is_fault=False)
            if after is not None and after != number:
                is_quiet = False
                self._edges.extend((number, after))
        for action in rules.faults(world):
            self._try(number, action, is_fault=True)
        if is_quiet and self._findings.broken is None:
            self._expand_quiet(number)

    def _expand_quiet(self, number: int) -> None:
        world, rules, found = self._worlds[number], self.rules, self._findings
        left = rules.what_is_left(world)
        if not left:
            found.num_quiet += 1
            found.endings.update(rules.endings(world))
            return
        if world.num_faults == found.scenario.num_faults or found.scenario.is_planned:
            self._break(number, (), "without any fault only a deadline ends this: " + "; ".join(left))
            return
        for action in rules.time(world):
            after = self._try(number, action, is_fault=False)
            if after is None:
                return
            if after != number:
                self._edges.extend((number, after))
                return
        self._break(number, (), "nothing ends this: " + "; ".join(left))

    def _try(self, number: int, action: Action, *, is_fault: bool) -> int | None:
        self._findings.num_steps += 1
        try:
            after = self.rules.apply(self._worlds[number], action, is_fault=is_fault)
        except LawBrokenError as error:
            self._break(number, action, str(error))
            return None
        return self._add(after, number, action)

    def _add(self, world: World, parent: int, action: Action) -> int:
        number = self._numbers.setdefault(world, len(self._worlds))
        if number == len(self._worlds):
            self._worlds.append(world)
            self._parents.append((parent, action))
        return number

    def _break(self, number: int, action: Action, law: str) -> None:
        found = self._findings
        if found.broken is not None:
            return
        found.broken = law
        steps: list[tuple[World, Action, World | None]] = (
            [(self._worlds[number], action, None)] if action else []
        )
        while (parent := self._parents[number])[0] >= 0:
            steps.append((self._worlds[parent[0]], parent[1], self._worlds[number]))
            number = parent[0]
        found.steps = steps[::-1]

    def _check_that_work_ends(self) -> None:
        """Check that progress makes no circles: without further faults every way ends in a quiet world."""
        num_after = array("L", bytes(8 * len(self._worlds)))
        before: dict[int, list[int]] = {}
        for index in range(0, len(self._edges), 2):
            num_after[self._edges[index]] += 1
            before.setdefault(self._edges[index + 1], []).append(self._edges[index])
        ready = [number for number in range(len(self._worlds)) if num_after[number] == 0]
        num_ended = 0
        while ready:
            number = ready.pop()
            num_ended += 1
            for parent in before.get(number, ()):
                num_after[parent] -= 1
                if num_after[parent] == 0:
                    ready.append(parent)
        if num_ended < len(self._worlds):
            circling = next(number for number in range(len(self._worlds)) if num_after[number])
            self._break(circling, (), "work goes round in circles here")
