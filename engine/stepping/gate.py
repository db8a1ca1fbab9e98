"""The gate that every step passes: the one place that decides when a step starts."""

from collections.abc import Callable
from typing import Protocol

from engine.stepping.pacing import StepPacing


class Work(Protocol):
    """An engine's answers to the questions of its gate."""

    def needs_step(self) -> bool:
        """Return whether a step could change anything."""

    def process_events(self) -> None:
        """Process what the connector has reported until now, so that the other answers are current."""

    def next_arrival(self) -> float | None:
        """Return when, on the clock, a request is expected to join the batch; None if unknown."""

    def has_answers_only(self) -> bool:
        """Return whether the next step holds answers, and no prompt waits."""

    def seconds_to_pause(self) -> float:
        """Return how long the next step leaves the machine to other clients (``engine.scheduling.batch.fair_steps``)."""


class StepGate(Protocol):
    """Decides when a step starts. Used from the engine's thread; ``may_interrupt`` from any thread.

    Every start has the gate's permission: by ``seconds_to_start``, ``may_continue`` or ``may_run_ahead``. Then ``started``
    follows, and ``ended`` or ``interrupted``. At most one step runs ahead: its ``started`` comes after the end of the one
    before, and no further permission is asked for until then. One that the scheduler has no step for is not used up.
    """

    def seconds_to_start(self, work: Work) -> float | None:
        """Return how long to delay the next step: 0 to start it now, inf to wait for a message; None while there is no work.

        The engine calls this again after every message; after a finite delay without a message it starts the step. At None
        it also watches its requests' deadlines.
        """

    def may_continue(self, work: Work) -> bool:
        """Return whether the next step may start before the results of the one that has just ended are processed."""

    def may_run_ahead(self, work: Work) -> bool:
        """Return whether the next step may be given to the device while this one is computed."""

    def may_interrupt(self) -> bool:
        """Return whether the running step should restart for a request that has just arrived."""

    def started(self) -> float:
        """Record that a step starts; return the seconds for which it was delayed."""

    def ended(self, *, is_empty: bool) -> None:
        """Record that a step has ended. is_empty: it computed nothing."""

    def interrupted(self) -> None:
        """Record that a step has ended without results."""


class PacedGate:
    """Starts a step as soon as there is work, after two delays: for a request that is about to join, and for other clients.

    share: see StepPacing.
    """

    def __init__(self, share: float, clock: Callable[[], float]) -> None:
        self._pacing = StepPacing(share, clock)
        # Not methods that call these: a step runs from cold caches, where each further function takes microseconds.
        self.may_interrupt = self._pacing.may_interrupt
        self.started = self._pacing.started
        self.ended = self._pacing.ended
        self.interrupted = self._pacing.interrupted
        self._is_idle = False

    def seconds_to_start(self, work: Work) -> float | None:
        """Return how long to delay the next step; see StepGate."""
        if not work.needs_step():
            self._is_idle = True
            return None
        if self._is_idle:
            self._is_idle = False
            self._pacing.idle_ended()
        if self._seconds_to_arrival(work) == 0 and work.seconds_to_pause() == 0:
            return 0.0
        work.process_events()
        if (pause := work.seconds_to_pause()) > 0:
            return pause
        return self._seconds_to_arrival(work) if work.has_answers_only() else 0.0

    def may_continue(self, work: Work) -> bool:
        """Return whether nothing is about to join the next step."""
        return self._seconds_to_arrival(work) == 0

    def may_run_ahead(self, work: Work) -> bool:
        """Return whether nothing is expected to join, who would wait a step longer, and no pause is due."""
        return work.next_arrival() is None and work.seconds_to_pause() == 0

    def _seconds_to_arrival(self, work: Work) -> float:
        due = work.next_arrival()
        return 0.0 if due is None else self._pacing.seconds_to_delay(due)
