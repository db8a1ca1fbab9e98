"""Step gates for tests: the product's own, and one that starts a step only when another thread allows it."""

import math
import threading
from collections.abc import Callable

import pytest

from engine.outputs import ModelRunnerOutput, SchedulerOutput
from engine.settings import EngineSettings
from engine.stepping.gate import StepGate, Work
from engine.stepping.loop import WAKE, Inbox, Put
from tests.fakes.engine.fakes import FakeExecutor, start_fake_executor


class AllowingGate(StepGate):
    """Starts no step before ``allow`` was called for it, as ranks that start their steps together do.

    ask: called when a step could start that was not allowed. num_allowed: steps that were allowed so far.
    """

    def __init__(self, ask: Callable[["AllowingGate"], None]) -> None:
        self._ask = ask
        self.num_allowed = 0
        self.num_started = 0

    def allow(self, num_steps: int = 1) -> None:
        """Allow this many steps more. From any one thread at a time."""
        self.num_allowed += num_steps

    def seconds_to_start(self, work: Work) -> float | None:
        if not work.needs_step():
            return None
        if self._is_allowed():
            return 0.0
        self._ask(self)
        return math.inf

    def may_continue(self, work: Work) -> bool:
        return self._is_allowed()

    def may_run_ahead(self, work: Work) -> bool:
        return self._is_allowed()

    def may_interrupt(self) -> bool:
        return False

    def on_start(self, *, is_empty: bool) -> float:
        assert self._is_allowed()
        self.num_started += 1
        return 0.0

    def on_end(self, *, is_empty: bool) -> None: ...

    def on_interrupt(self) -> None: ...

    def _is_allowed(self) -> bool:
        return self.num_started < self.num_allowed


class DeviceExecutor(FakeExecutor):
    """Fake ranks whose steps run ahead. num_begun: the steps that have begun. seen: called with it at each of them."""

    def __init__(self, settings: EngineSettings, seen: Callable[[int], object] = lambda _: None) -> None:
        super().__init__(settings)
        self.runs_ahead = True
        self.num_begun = 0
        self._seen = seen

    def begin(self, scheduled: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        self.num_begun += 1
        self._seen(self.num_begun)
        return super().begin(scheduled)


def start_device(settings: EngineSettings) -> tuple[DeviceExecutor, int]:
    """See ``start_fake_executor``."""
    executor = DeviceExecutor(settings)
    return executor, executor.memory.num_blocks


MakeGate = Callable[[Inbox], Callable[[Put], StepGate] | None]


def paced(_: Inbox) -> None:
    """Use the product's own gate."""


def allowed(inbox: Inbox) -> Callable[[Put], StepGate]:
    """Return a maker of gates of which another thread allows a step each time that they ask."""

    def allow(gate: AllowingGate) -> None:
        gate.allow()
        inbox.put(WAKE)

    return lambda _: AllowingGate(lambda gate: threading.Thread(target=allow, args=(gate,)).start())


GATES = pytest.mark.parametrize("make_gate", [paced, allowed])
STARTS = pytest.mark.parametrize("start", [start_fake_executor, start_device])
"""Ranks whose steps follow each other, and ranks whose steps run ahead."""
