"""Moving averages of how long steps take."""

from engine.outputs import SchedulerOutput

_WEIGHT = 0.05
"""Weight of the newest step; the last 20 steps dominate."""


class StepTimes:
    """Averages steps that compute prompts, and steps that only continue answers. Steps without tokens do not count.

    seconds: mean length of a step that only continues answers; None before the first one.
    """

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._prompt_seconds = 0.0
        self._prompt_tokens = 0.0

    @property
    def prefill_seconds_per_token(self) -> float | None:
        """Seconds of steps that compute prompts, divided by the tokens of these steps; None before the first one."""
        return self._prompt_seconds / self._prompt_tokens if self._prompt_tokens else None

    def note(self, scheduled: SchedulerOutput, seconds: float) -> None:
        """Record a step."""
        num_tokens = scheduled.total_num_scheduled_tokens
        if num_tokens > len(scheduled.num_scheduled_tokens):
            self._prompt_seconds += _WEIGHT * (seconds - self._prompt_seconds)
            self._prompt_tokens += _WEIGHT * (num_tokens - self._prompt_tokens)
        elif num_tokens:
            self.seconds = (
                seconds if self.seconds is None else self.seconds + _WEIGHT * (seconds - self.seconds)
            )
