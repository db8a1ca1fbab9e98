"""The latencies that the clients of one worker see, as means in which new samples count more than old ones."""

import math
import time
from collections.abc import Callable

_FADE_SECONDS = 10.0
"""Time after which a sample counts 1/e of a new one."""
_STALE_SECONDS = 60.0


class MovingMean:
    """The weighted mean of samples whose weights fade with time. clock: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sum = 0.0
        self._weight = 0.0
        self._last = -math.inf

    def add(self, value: float, weight: float = 1.0) -> None:
        """Add a sample."""
        now = self._clock()
        kept = math.exp((self._last - now) / _FADE_SECONDS)
        self._sum = self._sum * kept + value * weight
        self._weight = self._weight * kept + weight
        self._last = now

    @property
    def value(self) -> float | None:
        """The mean; None if there was no sample in the last minute."""
        is_stale = self._clock() - self._last > _STALE_SECONDS
        return None if is_stale else self._sum / self._weight


class WorkerLatency:
    """Measures one worker on the router's clock. clock: seconds, monotonic.

    first_token: from the arrival of requests to their first token, which this worker computed. token_gap: between two
    tokens of an answer. num_steps: steps that have arrived.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.first_token = MovingMean(clock)
        self.token_gap = MovingMean(clock)
        self.num_steps = 0
        self._last_step = clock()

    def note_step(self, num_entries: int, num_running_before: int) -> None:
        """Record that a step with this many entries has arrived.

        num_running_before: requests that were running after the step before. If there was none, the time since then is
        no client's wait.
        """
        self.num_steps += 1
        now = self._clock()
        if num_entries and num_running_before:
            self.token_gap.add(now - self._last_step, num_entries)
        self._last_step = now
