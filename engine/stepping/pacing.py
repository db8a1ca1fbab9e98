"""The delay of a step so that an arriving request can join it.

A request joins at the start of a step only. One that arrives when a step has just started waits for the end of that step,
and then for a whole one, before its next token exists. If its arrival is expected, the steps before it can be
spread so that one starts just then.
"""

import time
from collections.abc import Callable

_MAX_STEPS_AHEAD = 8
"""Steps to an arrival above which no step is delayed: estimates are not that exact."""
_GRACE = 0.15
"""The accepted delay of a request after its expected arrival, in steps."""
_MAX_LAST_DELAY = 0.5
"""The longest delay, in steps, for a request that would arrive during the coming step."""
_LATEST_INTERRUPT = 0.5
"""The part of a step after which it is not restarted for an arrival."""
_SMOOTHING = 0.25
_MAX_SAVED_STEPS = 4.0


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

    def started(self) -> float:
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

    def interrupted(self) -> None:
        """Record that the running step ended without results: its time counts as a delay of the next one."""
        self._is_delaying = self._step_seconds > 0

    def ended(self, *, is_empty: bool) -> None:
        """Record that a step has ended, and that the next one can start. is_empty: it computed nothing."""
        self._ready = self._clock()
        if is_empty:
            return
        seconds = self._ready - self._began
        known = self._step_seconds
        self._step_seconds = known + _SMOOTHING * (seconds - known) if known else seconds
        self._saved_steps = min(_MAX_SAVED_STEPS, self._saved_steps + self._share)

    def idle_ended(self) -> None:
        """Record that there was nothing to compute until now."""
        self._ready = self._clock()

    def seconds_to_delay(self, due: float) -> float:
        """Return the seconds from now by which to delay the next step. due: when a request should arrive, on the clock."""
        step = self._step_seconds
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
