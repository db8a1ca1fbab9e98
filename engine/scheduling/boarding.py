"""When a step begins that somebody is about to join.

A request joins at the beginning of a step only: one that arrives when a step has just begun waits for its end, and then
for a whole one, before its next token is there. Where it is known when it will arrive, the steps before can be spread so
that one begins just then.
"""

import time
from collections.abc import Callable

_MAX_STEPS_AHEAD = 8
"""Nobody is waited for who is further away: when it will arrive is not known that well."""
_GRACE = 0.15
"""Of a step: somebody may be so much later than expected."""
_MAX_LAST_HOLD = 0.5
"""Of a step: longer is not waited for somebody who would arrive in this one."""
_LATEST_CUT = 0.5
"""Of a step: who arrives later waits for its end."""
_SMOOTHING = 0.25
_MAX_SAVED_STEPS = 4.0


class Boarding:
    """Says how long to hold the next step. Knows how long steps take from those that were.

    share: of the time, that may go into holding; what is not used is saved, up to a few steps' worth. Used from one thread.
    """

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._share, self._clock = share, clock
        self._step_seconds = 0.0
        self._saved_steps = _MAX_SAVED_STEPS if share else 0.0
        self._began = self._ready = clock()
        self._is_holding = False

    def begun(self) -> float:
        """A step begins; returns for how many seconds it was held."""
        self._began, held = self._clock(), 0.0
        if self._is_holding:
            held = self._began - self._ready
            self._saved_steps -= held / self._step_seconds
        self._is_holding = False
        return held

    def may_cut_short(self) -> bool:
        """The step that is under way had better begin again, with who has just arrived. From any thread."""
        step = self._step_seconds
        gone = (self._clock() - self._began) / step if step else 1.0
        return gone < min(_LATEST_CUT, self._saved_steps)

    def cut_short(self) -> None:
        """The step was: as if it had been held until now."""
        self._is_holding = self._step_seconds > 0

    def ended(self, *, is_empty: bool) -> None:
        """It is over, and the next one can begin. is_empty: it computed nothing."""
        self._ready = self._clock()
        if is_empty:
            return
        seconds, known = self._ready - self._began, self._step_seconds
        self._step_seconds = known + _SMOOTHING * (seconds - known) if known else seconds
        self._saved_steps = min(_MAX_SAVED_STEPS, self._saved_steps + self._share)

    def rested(self) -> None:
        """There was nothing to compute until now."""
        self._ready = self._clock()

    def seconds_to_hold(self, due: float) -> float:
        """How long the next step had better wait from now on. due: when the next request is expected, by the clock."""
        step = self._step_seconds
        hold = steps_to_hold((due - self._ready) / step) if step else 0.0
        if not 0 < hold <= self._saved_steps:
            return 0.0
        left = self._ready + hold * step - self._clock()
        self._is_holding |= left > 0
        return max(0.0, left)


def steps_to_hold(until_due: float) -> float:
    """How long to hold a step that could begin now, if somebody is due in so long; both in units of a step.

    Somebody's gap between tokens grows in any case: those of the answers that are held, each a little when there are steps
    to spread it over, or that of the request that arrives in the middle of a step. The smaller one is chosen.
    """
    num_whole = max(0, int(until_due))
    rest = until_due - num_whole
    if num_whole > _MAX_STEPS_AHEAD or rest <= -_GRACE:
        return 0.0
    share = rest / (num_whole + 1)
    if share > 1 - rest:
        return 0.0
    return share if num_whole else min(rest + _GRACE, _MAX_LAST_HOLD)
