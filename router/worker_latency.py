"""The latencies that the clients of one worker see, as moving means."""

import time
from collections.abc import Callable

from router.moving_mean import MovingMean


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
