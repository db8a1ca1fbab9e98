"""The gate that every step passes: the one place that decides when a step starts.

A request joins at the start of a step only. One that arrives when a step has just started waits for the end of that step,
and then for a whole one, before its next token exists. If its arrival is expected, the steps before it can be
spread so that one starts just then (``StepPacing``).
"""

import time
from collections.abc import Callable
from typing import Protocol

from engine.settings import EngineSettings

# Steps to an arrival above which no step is delayed: estimates are not that exact.
_MAX_STEPS_AHEAD = 8
# The accepted delay of a request after its expected arrival, in steps.
_GRACE = 0.15
# The longest delay, in steps, for a request that would arrive during the coming step.
_MAX_LAST_DELAY = 0.5
# The part of a step after which it is not restarted for an arrival.
_LATEST_INTERRUPT = 0.5
_SMOOTHING = 0.25
_MAX_SAVED_STEPS = 4.0


class Work(Protocol):
    """An engine's answers to the questions of its gate."""

    def needs_step(self) -> bool:
        """Return whether a step could change anything."""

    def process_events(self) -> None:
        """Process what the connector has reported until now, so that the other answers are current."""

    def next_arrival(self) -> float | None:
        """Return when, on the clock, a request is expected to join the batch; None if unknown."""

    def is_decode_only(self) -> bool:
        """Return whether the next step holds answers, and no prompt waits."""

    def seconds_to_pause(self) -> float:
        """Return how long the next step leaves the machine to other clients (``engine.scheduling.batch.fair_steps``)."""


class StepGate(Protocol):
    """Decides when a step starts. Used from the engine's thread; ``may_interrupt`` from any thread.

    Every start has the gate's permission: by ``seconds_to_start``, ``may_continue`` or ``may_run_ahead``. Then ``on_start``
    follows, and ``on_end`` or ``on_interrupt``. At most one step runs ahead: its ``on_start`` comes after the end of the one
    before, and no further permission is asked for until then. One that the scheduler has no step for is not used up.

    ``EngineCore`` and its loop use a gate as follows; a gate that only watches steps subclasses ``PacedGate``::

        while (delay := gate.seconds_to_start(core)) is not None:
            if delay and wait_for_message(delay):   # a message is processed, and the gate asked anew
                continue
            scheduled = scheduler.schedule()
            gate.on_start(is_empty=False)
            output = executor.execute_model(scheduled)
            if output.was_interrupted:              # a connector's thread had ``may_interrupt``: the step is restarted
                gate.on_interrupt()
            else:
                gate.on_end(is_empty=False)
        gate.close()

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

    def must_compute(self) -> bool:
        """Return whether a step for which nothing is scheduled makes a forward pass nevertheless, of an empty batch."""
        return False

    def on_start(self, *, is_empty: bool) -> float:
        """Record that a step starts; return the seconds for which it was delayed. is_empty: it computes nothing."""

    def on_end(self, *, is_empty: bool) -> None:
        """Record that a step has ended. is_empty: it computed nothing."""

    def on_interrupt(self) -> None:
        """Record that a step has ended without results."""

    def complete_settings(self, settings: EngineSettings) -> EngineSettings:
        """Return the engine's settings with what the gate has agreed upon with other engines."""
        return settings

    def counters(self) -> dict[str, float]:
        """Return counters of the gate's own, with the names of ``serving.metric_names.WORKER_METRICS``."""
        return {}

    def may_end(self) -> bool:
        """Return whether the engine, which holds no request any more, may end. Asked again after every message and step."""
        return True

    def close(self) -> None:
        """Free what the gate holds, at the engine's end."""
        return


class StepPacing:
    """Measures how long steps take, and spends a share of the time on delays. Used from one thread.

    share: the part of the time that may go into delays. What is not used is saved, up to a few steps.
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._share = share
        self._clock = clock
        self._step_seconds = 0.0
        self._saved_steps = _MAX_SAVED_STEPS if share else 0.0
        self._began = self._ready = clock()
        self._is_delaying = False

    def on_start(self, *, is_empty: bool = False) -> float:
        """Record that a step starts; return the seconds for which it was delayed."""
        self._began = self._clock()
        delayed = 0.0
        if self._is_delaying:
            delayed = self._began - self._ready
            self._saved_steps -= delayed / self._step_seconds
        self._is_delaying = False
        return delayed

    def may_interrupt(self) -> bool:
        """Return whether the running step should restart for a request that has just arrived. From any thread."""
        step = self._step_seconds
        gone = (self._clock() - self._began) / step if step else 1.0
        return gone < min(_LATEST_INTERRUPT, self._saved_steps)

    def on_interrupt(self) -> None:
        """Record that the running step ended without results: its time counts as a delay of the next one."""
        self._is_delaying = self._step_seconds > 0

    def on_end(self, *, is_empty: bool) -> None:
        """Record that a step has ended, and that the next one can start. is_empty: it computed nothing."""
        self._ready = self._clock()
        if is_empty:  # its length is no measure for others
            return
        seconds = self._ready - self._began
        known = self._step_seconds
        self._step_seconds = known + _SMOOTHING * (seconds - known) if known else seconds
        self._saved_steps = min(_MAX_SAVED_STEPS, self._saved_steps + self._share)

    def on_idle_end(self) -> None:
        """Record that there was nothing to compute until now."""
        self._ready = self._clock()

    def seconds_to_delay(self, due: float) -> float:
        """Return the seconds from now by which to delay the next step. due: when a request should arrive, on the clock."""
        step = self._step_seconds
        # From the time at which the step could have started, so that a second question gives the same start.
        delay = steps_to_delay((due - self._ready) / step) if step else 0.0
        if not 0 < delay <= self._saved_steps:
            return 0.0
        left = self._ready + delay * step - self._clock()
        self._is_delaying |= left > 0
        return max(0.0, left)


def steps_to_delay(until_due: float) -> float:
    """Return how long to delay a step that could start now, for a request that is due in ``until_due``; both in steps.

    Some gap between tokens grows in any case: those of the answers that are delayed (each a little, if there are steps to
    spread the delay over), or that of the request that arrives in the middle of a step. The smaller one is chosen.
    """
    num_whole = max(0, int(until_due))
    rest = until_due - num_whole
    if num_whole > _MAX_STEPS_AHEAD or rest <= -_GRACE:
        return 0.0
    share = rest / (num_whole + 1)
    if share > 1 - rest:
        return 0.0
    return share if num_whole else min(rest + _GRACE, _MAX_LAST_DELAY)


class PacedGate:
    """Starts a step as soon as there is work, after two delays: for a request that is about to join, and for other clients.

    share: see StepPacing.
    """

    def __init__(self, share: float, clock: Callable[[], float]) -> None:
        self._pacing = StepPacing(share, clock)
        # Not methods that call these: a step runs from cold caches, where each further function takes microseconds.
        self.may_interrupt = self._pacing.may_interrupt
        self.on_start = self._pacing.on_start
        self.on_end = self._pacing.on_end
        self.on_interrupt = self._pacing.on_interrupt
        self._is_idle = False

    def seconds_to_start(self, work: Work) -> float | None:
        """Return how long to delay the next step; see StepGate."""
        if not work.needs_step():
            self._is_idle = True
            return None
        if self._is_idle:
            self._is_idle = False
            self._pacing.on_idle_end()
        if self._seconds_to_arrival(work) == 0 and work.seconds_to_pause() == 0:
            return 0.0
        # A delay is only worth it if what it waits for has not come already.
        work.process_events()
        if (pause := work.seconds_to_pause()) > 0:
            return pause
        return self._seconds_to_arrival(work) if work.is_decode_only() else 0.0

    def may_continue(self, work: Work) -> bool:
        """Return whether nothing is about to join the next step."""
        due = work.next_arrival()
        return due is None or self._pacing.seconds_to_delay(due) == 0

    def may_run_ahead(self, work: Work) -> bool:
        """Return whether nothing is expected to join, who would wait a step longer, and no pause is due."""
        return work.next_arrival() is None and work.seconds_to_pause() == 0

    def must_compute(self) -> bool:
        """See StepGate."""
        return False

    def complete_settings(self, settings: EngineSettings) -> EngineSettings:
        """See StepGate."""
        return settings

    def counters(self) -> dict[str, float]:
        """See StepGate."""
        return {}

    def may_end(self) -> bool:
        """See StepGate."""
        return True

    def close(self) -> None:
        """See StepGate. It holds nothing."""

    def _seconds_to_arrival(self, work: Work) -> float:
        due = work.next_arrival()
        return 0.0 if due is None else self._pacing.seconds_to_delay(due)
