"""The start of steps: after the one before, or before its results are there."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.connecting import EngineConnector
from engine.outputs import ModelRunnerOutput, SchedulerOutput
from engine.scheduling.scheduler import Scheduler
from engine.stepping.gate import StepGate, Work

if TYPE_CHECKING:
    from engine.executors.executor import Executor

StartedStep = tuple[SchedulerOutput, Callable[[], ModelRunnerOutput]]
"""A step's order, and what waits for its results."""


class StepStarter:
    """Begins the scheduler's steps on the executor, each with the gate's permission. Owns the one that has started early.

    The caller of ``take`` has asked ``StepGate.seconds_to_start``.
    """

    def __init__(
        self, scheduler: Scheduler, executor: "Executor", connector: EngineConnector, gate: StepGate
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._connector = connector
        self._gate = gate
        self._started: StartedStep | None = None

    @property
    def step_in_flight(self) -> bool:
        """True while the next step has started already."""
        return self._started is not None

    def take(self) -> StartedStep:
        """Return the step that has started already, or start one."""
        started = self._started
        if started is not None:
            self._started = None
            return started
        self._scheduler.on_transfers_finished(*self._connector.take_finished())
        if self._scheduler.remote_kv.has_work:
            self._scheduler.process_events()
            if self._connector.has_arrived():  # read from a peer's memory as soon as it had blocks
                self._scheduler.on_transfers_finished(*self._connector.take_finished())
        return self._start(self._scheduler.schedule())

    def run_ahead(self, scheduled: SchedulerOutput, work: Work, may_start: Callable[[], bool]) -> None:
        """Start the step after ``scheduled``, which is being computed, if it may run ahead and no request will join it."""
        if not self._executor.runs_ahead or not may_start() or not self._gate.may_run_ahead(work):
            return
        if following := self._scheduler.schedule_ahead(scheduled):
            self._started = following, self._executor.begin(following)

    def step_ended(self, output: ModelRunnerOutput, work: Work, may_start: Callable[[], bool]) -> None:
        """Start the next step before ``output``, the results of this one, are processed, if they cannot change it."""
        if self._started is not None:
            self._note_start()  # the device computes it from now on
        elif may_start() and self._gate.may_continue(work):
            following = self._scheduler.schedule_early(output)
            self._started = self._start(following) if following else None

    def _start(self, scheduled: SchedulerOutput) -> StartedStep:
        self._note_start()
        return scheduled, self._executor.begin(scheduled)

    def _note_start(self) -> None:
        self._scheduler.totals.held_seconds += self._gate.started()
