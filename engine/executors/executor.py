"""Executors call methods on the ranks of one engine: a single one in the caller's process, several in their own."""

from collections.abc import Callable
from typing import Any, Protocol

from contract.errors import InternalError
from contract.layout import KVLayout
from engine.compute.forward import MakeForward
from engine.compute.runner import ModelRunner
from engine.connector import RanksConnector
from engine.distributed.executor import RanksExecutor
from engine.kv_cache.sizing import MemoryProbe
from engine.models.info import ModelInfo
from engine.outputs import ModelRunnerOutput, SchedulerOutput
from engine.settings import EngineSettings


class Executor(Protocol):
    """All ranks of one engine, one per device."""

    @property
    def model_info(self) -> ModelInfo:
        """The model that every rank has loaded."""

    @property
    def layout(self) -> KVLayout:
        """The shape of a block. Raises InternalError before the KV start-up."""

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of ``ModelRunner`` on every rank; return the results in rank order."""

    def set_connector(self, connector: RanksConnector) -> None:
        """Give every rank its half of the connector; after the KV start-up.

        Raises SettingError if the connector is for another number of ranks.
        """

    def execute_model(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step on all ranks; return the first rank's result."""

    @property
    def runs_ahead(self) -> bool:
        """True if a step may begin before the one before is waited for; see ``ModelRunner.begin``."""

    def begin(self, scheduled: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Start a step on all ranks. The function that is returned waits for it and returns the first rank's result.

        It must be called before any other method, but for the ``begin`` of one step that runs ahead.
        """

    def interrupt(self) -> None:
        """Ask the running step to end without results (``was_interrupted``), from any thread. It may run to its end."""

    def watch(self, wake: Callable[[], None]) -> None:
        """Call ``wake``, from any thread, when a rank has ended by itself: the next step then raises. Called once."""

    def shutdown(self) -> None:
        """End all ranks and free their memory. May be called twice."""


class InProcessExecutor:
    """One rank in this process; its model is loaded when the constructor returns. make_forward: see ``load_model``."""

    def __init__(
        self,
        settings: EngineSettings,
        probe: MemoryProbe | None = None,
        make_forward: MakeForward | None = None,
    ) -> None:
        self.runner = ModelRunner(settings, probe)
        self.runner.load_model(make_forward=make_forward)
        self._is_shut_down = False

    @property
    def model_info(self) -> ModelInfo:
        """See Executor."""
        return self.runner.model_info

    @property
    def layout(self) -> KVLayout:
        """See Executor."""
        return self.runner.memory.layout

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """See Executor. Raises InternalError for a method that the runner does not have."""
        function = None if method.startswith("_") else getattr(self.runner, method, None)
        if not callable(function):
            raise InternalError(f"a rank has no method {method!r}")
        return [function(*args)]

    def set_connector(self, connector: RanksConnector) -> None:
        """See Executor."""
        self.runner.set_connector(connector.in_process())

    def execute_model(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """See Executor."""
        return self.begin(scheduled)()

    @property
    def runs_ahead(self) -> bool:
        """See Executor."""
        return self.runner.runs_ahead

    def begin(self, scheduled: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """See Executor."""
        return self.runner.begin(scheduled)

    def interrupt(self) -> None:
        """See Executor."""
        self.runner.interrupt()

    def watch(self, wake: Callable[[], None]) -> None:
        """See Executor. The rank cannot end before its caller."""

    def shutdown(self) -> None:
        """See Executor."""
        if not self._is_shut_down:
            self._is_shut_down = True
            self.runner.shutdown()


def create_executor(settings: EngineSettings, probe: MemoryProbe | None = None) -> Executor:
    """Return the executor for these settings, with its ranks' models loaded. ``probe`` is for a single rank.

    Raises SettingError for an unknown device, for "cuda" with fewer devices than ranks, and for a model that cannot
    be divided by their number.
    """
    if settings.tensor_parallel_size > 1:
        return RanksExecutor(settings)
    return InProcessExecutor(settings, probe)
