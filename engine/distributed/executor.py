"""The executor of several ranks, each in a process of its own: a call goes to all of them, their answers come back."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from contract.errors import InternalError
from contract.layout import KVLayout
from engine.connector import RanksConnector
from engine.distributed.messages import MethodTypes
from engine.distributed.rank_pool import RankPool
from engine.models.info import ModelInfo
from engine.outputs import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from engine.settings import EngineSettings

_SLOW_CALL_SECONDS = 1800.0
"""For loading weights; a collective within a call has the ranks' own, shorter limit."""
_STEP_MARGIN_SECONDS = 5.0


class RanksExecutor:
    """An Executor over rank processes; their models are loaded when the constructor returns. Used from one thread."""

    def __init__(self, settings: EngineSettings) -> None:
        self._step_seconds = settings.rank_timeout_seconds + _STEP_MARGIN_SECONDS
        self._types = MethodTypes()
        self._layout: KVLayout | None = None
        self._connector: RanksConnector | None = None
        self._num_begun = 0
        self._without_masks: SchedulerOutput | None = None
        """The newest step, if it was begun ahead: the ranks do not have its masks yet."""
        self._pool = RankPool(settings)
        with ExitStack() as undo:
            undo.callback(self.shutdown)
            self.collective_rpc("load_model")
            self._model_info: ModelInfo = self._call_for_one("get_model_info")
            self.runs_ahead: bool = self._call_for_one("get_runs_ahead")
            undo.pop_all()

    @property
    def model_info(self) -> ModelInfo:
        """See Executor."""
        return self._model_info

    @property
    def layout(self) -> KVLayout:
        """See Executor; it has one rank's share of the heads."""
        if self._layout is None:
            raise InternalError("the executor was used before initialize_from_config")
        return self._layout

    @property
    def pids(self) -> list[int]:
        """The ids of the rank processes, in rank order."""
        return [process.pid for process in self._pool.processes]

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """See Executor. What a rank raised is raised here, as the same kind of error, with the rank's name.

        Raises InternalError for a method that the runner does not have and for arguments that are not plain data,
        WorkerLostError when a rank has died or does not answer.
        """
        self._pool.call(self._types.encode_call(method, args, None), is_step=False)
        answers = self._pool.answers(method, _SLOW_CALL_SECONDS)
        values = [
            self._types.decode_value(method, answer.value) for answer in answers if answer.value is not None
        ]
        if method == "initialize_from_config":
            self._layout = values[0]
        return values

    def set_connector(self, connector: RanksConnector) -> None:
        """See Executor; ``shutdown`` closes it."""
        self._connector = connector
        processes = self._pool.processes
        plans = connector.connect(
            [process.take_connector_socket() for process in processes],
            [process.connector_descriptor for process in processes],
        )
        self.collective_rpc("open_connector", plans)
        connector.begin()

    def execute_model(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """See Executor."""
        return self.begin(scheduled)()

    def begin(self, scheduled: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """See Executor; only rank 0 sends its result.

        Ranks that run ahead get the begin and the end of a step as calls of their own, so they make the same collectives in
        the same order, whichever of them is faster.
        """
        if not self.runs_ahead:
            self._pool.call(self._types.encode_call("execute_model", (scheduled,), 0), is_step=True)
            return partial(self._result, "execute_model")
        call = self._types.encode_call("begin_step", (scheduled, self._take_masks()), None, is_answered=False)
        self._pool.call(call, is_step=False, is_answered=False)  # its end, which follows, is watched
        if self._num_begun:
            self._without_masks = scheduled
        self._num_begun += 1
        return partial(self._finish, scheduled)

    def _finish(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        self._num_begun -= 1
        masks = self._take_masks() if self._without_masks is scheduled else None
        self._pool.call(self._types.encode_call("finish_step", (masks,), 0), is_step=True)
        return self._result("finish_step")

    def _take_masks(self) -> GrammarOutput | None:
        """Return the masks of the step that was begun before its grammars had advanced; they are known now."""
        scheduled = self._without_masks
        self._without_masks = None
        return scheduled.grammar_output if scheduled else None

    def _result(self, method: str) -> ModelRunnerOutput:
        answers = self._pool.answers(method, self._step_seconds)
        if answers[0].value is None:
            raise InternalError("rank 0 did not return the step's result")
        output: ModelRunnerOutput = self._types.decode_value(method, answers[0].value)
        if self._connector is not None:
            sent, received = self._connector.take_finished()
            output.finished_sending = sent or None
            output.finished_recving = received or None
        return output

    def interrupt(self) -> None:
        """See Executor. Do nothing: the ranks have to agree on what they compute."""

    def watch(self, wake: Callable[[], None]) -> None:
        """See Executor."""
        self._pool.notify_at_end(wake)

    def shutdown(self) -> None:
        """See Executor."""
        self._pool.end()
        if self._connector is not None:
            self._connector.close()

    def _call_for_one(self, method: str) -> Any:
        """Return the result that must be equal on all ranks."""
        first, *others = self.collective_rpc(method)
        if any(other != first for other in others):
            self._pool.fail(f"the ranks differ in {method}: {[first, *others]}")
        return first
