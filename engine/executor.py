"""Calls methods on the ranks of one engine. This version has one rank, in the caller's process."""

from typing import Any, Protocol

from contract.errors import InternalError
from contract.layout import KVLayout
from engine.connector import RankConnector
from engine.kv_cache.sizing import MemoryProbe
from engine.models.info import ModelInfo
from engine.outputs import ModelRunnerOutput, SchedulerOutput
from engine.runner import ModelRunner
from engine.settings import EngineSettings


class Executor(Protocol):
    """All ranks of one engine, one per device."""

    @property
    def model_info(self) -> ModelInfo:
        """What every rank has loaded."""

    @property
    def layout(self) -> KVLayout:
        """The shape of a block. Raises InternalError before the KV start-up."""

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """Call this method of ``ModelRunner`` on every rank; results in rank order."""

    def set_connector(self, rank: RankConnector) -> None:
        """Put in the ranks' half of the connector; after the KV start-up."""

    def execute_model(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step on all ranks; the first rank's result."""

    def shutdown(self) -> None:
        """End all ranks and give their memory back. May be called twice."""


class InProcessExecutor:
    """One rank in this process; its model is loaded when the constructor returns."""

    def __init__(self, settings: EngineSettings, probe: MemoryProbe | None = None) -> None:
        self.runner = ModelRunner(settings, probe)
        self.runner.load_model()
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

    def set_connector(self, rank: RankConnector) -> None:
        """See Executor."""
        self.runner.set_connector(rank)

    def execute_model(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """See Executor."""
        return self.runner.execute_model(scheduled)

    def shutdown(self) -> None:
        """See Executor."""
        if not self._is_shut_down:
            self._is_shut_down = True
            self.runner.shutdown()


def create_executor(settings: EngineSettings, probe: MemoryProbe | None = None) -> Executor:
    """The executor for the device in the settings: on CPU and on one CUDA device a rank in this process.

    Raises SettingError for an unknown device, and for "cuda" where there is none.
    """
    return InProcessExecutor(settings, probe)
