"""The runner of one of several ranks: its methods are calls, so a step is begun and finished by two of them."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.compute.runner import ModelRunner
from engine.distributed.group import RankGroup
from engine.outputs import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from engine.settings import EngineSettings


@dataclass(frozen=True)
class _Begun:
    """A step that is not finished."""

    scheduled: SchedulerOutput
    finish: Callable[[], ModelRunnerOutput]


class RankRunner(ModelRunner):
    """A ModelRunner whose steps may be begun ahead by calls. All ranks get the same calls in the same order."""

    def __init__(self, settings: EngineSettings, group: RankGroup) -> None:
        super().__init__(settings, group=group)
        self._begun: deque[_Begun] = deque()

    def echo(self, payload: bytes) -> bytes:
        """Return the payload, as a sign that this rank can be reached."""
        return payload

    def get_runs_ahead(self) -> bool:
        """Return ``runs_ahead``."""
        return self.runs_ahead

    def begin_step(self, scheduled: SchedulerOutput, masks: GrammarOutput | None) -> None:
        """Begin a step; see ``begin``. masks: those of the step before, if it was begun without them."""
        if masks is not None:
            self._begun[-1].scheduled.add_grammar_output(masks)
        self._begun.append(_Begun(scheduled, self.begin(scheduled)))

    def finish_step(self, masks: GrammarOutput | None) -> ModelRunnerOutput:
        """Wait for the oldest step that is not finished. masks: its own, if it was begun without them."""
        begun = self._begun.popleft()
        if masks is not None:
            begun.scheduled.add_grammar_output(masks)
        return begun.finish()
