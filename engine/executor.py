"""Executors call methods on the ranks of one engine: a single one in the caller's process, several in their own."""

import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Protocol

from contract.errors import InternalError, KvbatonError
from contract.layout import KVLayout
from engine.compute.forward import MakeForward
from engine.compute.runner import ModelRunner
from engine.connector import RanksConnector
from engine.distributed.messages import MethodTypes, arguments_of
from engine.distributed.rank_pool import RankPool
from engine.kv_cache.sizing import MemoryProbe
from engine.kv_cache.startup import KVCacheConfig
from engine.kv_tiers.orders import TierOrder
from engine.kv_tiers.rank_tiers import open_tiers
from engine.kv_tiers.storage import TierStorage
from engine.kv_tiers.tier_group import TierGroup
from engine.models.config import ModelInfo
from engine.outputs import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from engine.settings import EngineSettings


class Executor(Protocol):
    """All ranks of one engine, one per device."""

    @property
    def model_info(self) -> ModelInfo:
        """The model that every rank has loaded."""

    @property
    def layout(self) -> KVLayout:
        """The shape of a block. Raises InternalError before the KV start-up."""

    @property
    def kv_cache_config(self) -> KVCacheConfig | None:
        """The allocation of the KV start-up; None: blocks of ``layout`` alone."""
        return None

    def collective_rpc(self, method: str, *args: Any, **named: Any) -> list[Any]:
        """Call a method of ``ModelRunner`` on every rank, with arguments by position or name; results in rank order."""

    def set_connector(self, connector: RanksConnector) -> None:
        """Give every rank its half of the connector; after the KV start-up.

        Raises SettingError if the connector is for another number of ranks.
        """

    def open_kv_tiers(self, settings: EngineSettings) -> list[TierStorage]:
        """Return the storages of the KV tiers that the settings ask for, fastest first; after the KV start-up.

        ``shutdown`` closes them. Raises SettingError for a size that cannot be, and a folder that cannot be used.
        """
        return []

    def execute_model(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step on all ranks; return the first rank's result."""
        return self.begin(scheduled)()

    @property
    def runs_ahead(self) -> bool:
        """True if a step may begin before the one before is waited for; see ``ModelRunner.begin``."""

    def begin(self, scheduled: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """Start a step on all ranks. The function that is returned waits for it and returns the first rank's result.

        It must be called before any other method, but for the ``begin`` of one step that runs ahead.
        """

    def interrupt(self) -> None:
        """Ask the running step to end without results (``was_interrupted``), from any thread. It may run to its end."""
        return  # several ranks have to agree on what they compute

    def watch(self, wake: Callable[[], None]) -> None:
        """Call ``wake``, from any thread, when a rank has ended by itself: the next step then raises. Called once."""
        return  # a rank of this process cannot end before its caller

    def shutdown(self) -> None:
        """End all ranks and free their memory. May be called twice."""


class InProcessExecutor(Executor):
    """One rank in this process; its model is loaded when the constructor returns. make_forward: see ``load_model``."""

    runs_ahead = False

    def __init__(
        self,
        settings: EngineSettings,
        probe: MemoryProbe | None = None,
        make_forward: MakeForward | None = None,
    ) -> None:
        self.runner = ModelRunner(settings, probe)
        self.runner.load_model(make_forward=make_forward)
        self.runs_ahead = self.runner.runs_ahead
        self._tiers: list[TierStorage] = []
        self._is_shut_down = False

    @property
    def model_info(self) -> ModelInfo:
        """See Executor."""
        return self.runner.model_info

    @property
    def layout(self) -> KVLayout:
        """See Executor."""
        return self.runner.memory.layout

    @property
    def kv_cache_config(self) -> KVCacheConfig:
        """See Executor."""
        return self.runner.regions.config

    def collective_rpc(self, method: str, *args: Any, **named: Any) -> list[Any]:
        """See Executor. Raises InternalError for a method that the runner does not have, or arguments that do not fit it."""
        function = None if method.startswith("_") else getattr(self.runner, method, None)
        if not callable(function):
            raise InternalError(f"a rank has no method {method!r}")
        return [function(*arguments_of(function, args, named))]

    def set_connector(self, connector: RanksConnector) -> None:
        """See Executor."""
        self.runner.set_connector(connector.in_process())

    def open_kv_tiers(self, settings: EngineSettings) -> list[TierStorage]:
        """See Executor."""
        self._tiers = open_tiers(
            settings, self.runner.memory, self.model_info.fingerprint, self.kv_cache_config.cache.groups
        )
        return self._tiers

    def begin(self, scheduled: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """See Executor."""
        return self.runner.begin(scheduled)

    def interrupt(self) -> None:
        """See Executor."""
        self.runner.interrupt()

    def shutdown(self) -> None:
        """See Executor."""
        if not self._is_shut_down:
            self._is_shut_down = True
            for tier in self._tiers:  # before the pool that they copy from and to
                tier.close()
            self.runner.shutdown()


def create_executor(settings: EngineSettings, probe: MemoryProbe | None = None) -> Executor:
    """Return the executor for these settings, with its ranks' models loaded. ``probe`` is for a single rank.

    Raises SettingError for an unknown device, for "cuda" with fewer devices than ranks, and for a model that cannot
    be divided by their number.
    """
    if settings.tensor_parallel_size > 1:
        return RanksExecutor(settings)
    return InProcessExecutor(settings, probe)


# For loading weights; a collective within a call has the ranks' own, shorter limit.
_SLOW_CALL_SECONDS = 1800.0
_STEP_MARGIN_SECONDS = 5.0


class RanksExecutor(Executor):
    """An Executor over rank processes; their models are loaded when the constructor returns. Used from one thread."""

    runs_ahead = False

    def __init__(self, settings: EngineSettings) -> None:
        self._step_seconds = settings.rank_timeout_seconds + _STEP_MARGIN_SECONDS
        self._types = MethodTypes()
        self._config: KVCacheConfig | None = None
        self._connector: RanksConnector | None = None
        self._tiers: TierGroup | None = None
        self._num_begun = 0
        # The newest step, if it was begun ahead: the ranks do not have its masks yet.
        self._without_masks: SchedulerOutput | None = None
        self._pool = RankPool(settings)
        with ExitStack() as undo:
            undo.callback(self.shutdown)
            self.collective_rpc("load_model")
            self._model_info: ModelInfo = self._call_for_one("get_model_info")
            self.runs_ahead = self._call_for_one("get_runs_ahead")
            undo.pop_all()

    @property
    def model_info(self) -> ModelInfo:
        """See Executor."""
        return self._model_info

    @property
    def layout(self) -> KVLayout:
        """See Executor; it has one rank's share of the heads."""
        if self._config is None:
            raise InternalError("the executor was used before initialize_from_config")
        return self._config.cache.groups[0].layout

    @property
    def kv_cache_config(self) -> KVCacheConfig | None:
        """See Executor."""
        return self._config

    @property
    def pids(self) -> list[int]:
        """The ids of the rank processes, in rank order."""
        return [process.pid for process in self._pool.processes]

    def collective_rpc(self, method: str, *args: Any, **named: Any) -> list[Any]:
        """See Executor. What a rank raised is raised here, as the same kind of error, with the rank's name.

        Raises InternalError for a method that the runner does not have and for arguments that do not fit it or are not
        plain data, WorkerLostError when a rank has died or does not answer.
        """
        self._pool.call(self._types.encode_call(method, args, None, given=named), is_step=False)
        answers = self._pool.answers(method, _SLOW_CALL_SECONDS)
        values = [
            self._types.decode_value(method, answer.value) for answer in answers if answer.value is not None
        ]
        if method == "initialize_from_config":
            self._config = args[0] if args else named["config"]
        if method == "reload_weights":
            self._model_info = values[0]
        return values

    def set_connector(self, connector: RanksConnector) -> None:
        """See Executor; ``shutdown`` closes it."""
        self._connector = connector
        processes = self._pool.processes
        plans = connector.connect(
            [process.detach_connector_socket() for process in processes],
            [process.connector_descriptor for process in processes],
        )
        self.collective_rpc("open_connector", plans)
        connector.begin()

    def open_kv_tiers(self, settings: EngineSettings) -> list[TierStorage]:
        """See Executor; each rank opens its part, by the settings that it was started with."""
        if not settings.host_kv_bytes and settings.disk_kv_dir is None:
            return []
        # Copies, since the pool closes its own before the last report may have been read.
        reports = [
            Connection(os.dup(process.channel.tier_reports.fileno()), writable=False)
            for process in self._pool.processes
        ]
        self._tiers = TierGroup(reports, self._order_kv_tiers)
        return [*self._tiers.open(self.collective_rpc("open_kv_tiers"))]

    def _order_kv_tiers(self, orders: list[TierOrder]) -> bool:
        """Send orders to the ranks' KV tiers without a step, if the ring has room for that; return whether it has."""
        if self._pool.is_attentive:
            call = self._types.encode_call("order_kv_tiers", (orders,), None, is_answered=False)
            self._pool.call(call, is_step=False, is_answered=False)
            return True
        return False

    def begin(self, scheduled: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """See Executor; only rank 0 sends its result."""
        if self._tiers is not None:
            scheduled.kv_tier_orders = self._tiers.pop_orders()
        if not self.runs_ahead:
            self._pool.call(self._types.encode_call("execute_model", (scheduled,), 0), is_step=True)
            return partial(self._result, "execute_model")
        # Begin and end are calls of their own, so that all ranks, however fast, make the same collectives in the same order.
        call = self._types.encode_call("begin_step", (scheduled, self._pop_masks()), None, is_answered=False)
        self._pool.call(call, is_step=False, is_answered=False)  # its end, which follows, is watched
        if self._num_begun:
            self._without_masks = scheduled
        self._num_begun += 1
        return partial(self._finish, scheduled)

    def _finish(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        self._num_begun -= 1
        masks = self._pop_masks() if self._without_masks is scheduled else None
        self._pool.call(self._types.encode_call("finish_step", (masks,), 0), is_step=True)
        return self._result("finish_step")

    def _pop_masks(self) -> GrammarOutput | None:
        """Return the masks of the step that was begun before its grammars had advanced; they are known now."""
        scheduled = self._without_masks
        self._without_masks = None
        if scheduled is None or scheduled.grammar_bitmask is None:
            return None
        return GrammarOutput(scheduled.structured_output_request_ids, scheduled.grammar_bitmask)

    def _result(self, method: str) -> ModelRunnerOutput:
        answers = self._pool.answers(method, self._step_seconds)
        if answers[0].value is None:
            raise InternalError("rank 0 did not return the step's result")
        output: ModelRunnerOutput = self._types.decode_value(method, answers[0].value)
        if self._connector is not None:
            sent, received = self._connector.get_finished()
            output.finished_sending = sent or None
            output.finished_recving = received or None
        return output

    def watch(self, wake: Callable[[], None]) -> None:
        """See Executor."""
        self._pool.notify_at_end(wake)

    def shutdown(self) -> None:
        """See Executor."""
        with suppress(KvbatonError):  # the ranks may have ended
            if self._tiers is not None:
                self._tiers.flush()  # content that was dropped must not come back at the next start
        self._pool.end()
        if self._tiers is not None:
            self._tiers.close()
        if self._connector is not None:
            self._connector.close()

    def _call_for_one(self, method: str) -> Any:
        """Return the result that must be equal on all ranks."""
        first, *others = self.collective_rpc(method)
        # Ranks that differ here would make different collectives, and wait for each other for ever.
        if any(other != first for other in others):
            self._pool.fail(f"the ranks differ in {method}: {[first, *others]}")
        return first
