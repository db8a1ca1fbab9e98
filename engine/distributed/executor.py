"""Several ranks, each in a process of its own: a call goes to all of them, their answers come back.

Calls are broadcast over one ring in shared memory, and each rank has a ring for its answers
(``engine.distributed.channel``). One call is under way at a time, so the ranks make the same collectives in the same order.
A rank that dies or falls silent breaks the group for good: the call raises, and so does every later one.
"""

import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from multiprocessing import connection
from pathlib import Path
from typing import Any, NoReturn, cast

import zmq

from contract.errors import InternalError, KvbatonError, SettingError, WorkerLostError, error_from_kind
from contract.layout import KVLayout
from engine.connector import RankConnector, RankConnectorPlan, RanksConnector
from engine.distributed.channel import NUM_SLOTS, RING_SLOT_BYTES, calls_ring, put
from engine.distributed.messages import MethodTypes, Raised, Returned
from engine.distributed.process import GroupPlan, RankProcess
from engine.distributed.process_group import listen_for_ranks
from engine.distributed.pulse import RankWatch
from engine.distributed.ring import create_shared_file, ring_bytes
from engine.hosting.watching import LivenessTimeouts
from engine.models.info import ModelInfo
from engine.outputs import ModelRunnerOutput, SchedulerOutput
from engine.settings import EngineSettings

logger = logging.getLogger(__name__)

_JOIN_SECONDS = 300.0
_SLOW_CALL_SECONDS = 1800.0
"""For loading weights; a collective within a call has the ranks' own, shorter limit."""
_OTHERS_SECONDS = 2.0
"""After one rank's failure: how long the others may take to answer before they count as stuck."""
_STEP_MARGIN_SECONDS = 5.0
_EXIT_SECONDS = 10.0

_Outcome = Returned | Raised | str
"""A rank's answer, or how its process ended or that it is silent."""


class RanksExecutor:
    """An Executor over rank processes; their models are loaded when the constructor returns. Used from one thread."""

    def __init__(self, settings: EngineSettings) -> None:
        self._step_seconds = settings.rank_timeout_seconds + _STEP_MARGIN_SECONDS
        self._types = MethodTypes()
        self._layout: KVLayout | None = None
        self._failure: str | None = None
        self._is_shut_down = False
        self._processes: list[RankProcess] = []
        self._watchers: list[threading.Thread] = []
        self._connector: RanksConnector | None = None
        self._watch: RankWatch | None = None
        with ExitStack() as undo:
            undo.callback(self.shutdown)
            self._start(settings)
            patience = LivenessTimeouts(settings.peer_timeout_seconds, settings.step_timeout_seconds)
            self._watch = RankWatch(self._processes, patience)
            self._watch.start()
            self.collective_rpc("load_model")
            self._model_info: ModelInfo = self._call_for_one("get_model_info")
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
        """The rank processes, in rank order."""
        return [process.pid for process in self._processes]

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """See Executor. What a rank raised is raised here, as the same kind of error, with the rank's name.

        Raises InternalError for a method that the runner does not have and for arguments that are not plain data,
        WorkerLostError when a rank has died or does not answer.
        """
        self._ask(method, args, None)
        answers = self._gather(method, _SLOW_CALL_SECONDS)
        values = [
            self._types.decode_value(method, answer.value) for answer in answers if answer.value is not None
        ]
        if method == "initialize_from_config":
            self._layout = values[0]
        return values

    def set_connector(self, rank: RankConnector) -> None:
        """Raises SettingError: one half cannot serve several ranks; see ``join_ranks``."""
        raise SettingError(
            f"tensor_parallel_size is {len(self._processes)}; this half of a connector is for one rank only",
            param="tensor_parallel_size",
        )

    def join_ranks(self, connector: RanksConnector) -> None:
        """See ``engine.connector.JoinsRanks``."""
        self._connector = connector
        connector.connect([process.take_line() for process in self._processes])
        plans = [
            RankConnectorPlan(connector.opener, connector.settings_of(process.rank), process.line_descriptor)
            for process in self._processes
        ]
        self.collective_rpc("open_connector", plans)
        connector.begin()

    def execute_model(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """See Executor."""
        return self.begin(scheduled)()

    def begin(self, scheduled: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        """See Executor; only rank 0's result travels."""
        self._ask("execute_model", (scheduled,), 0)
        return self._finish

    def _finish(self) -> ModelRunnerOutput:
        answers = self._gather("execute_model", self._step_seconds)
        if answers[0].value is None:
            raise InternalError("rank 0 did not return the step's result")
        output: ModelRunnerOutput = self._types.decode_value("execute_model", answers[0].value)
        if self._connector is not None:
            sent, received = self._connector.take_finished()
            output.finished_sending = sent or None
            output.finished_recving = received or None
        return output

    def interrupt(self) -> None:
        """See Executor. Ranks go on to the end: they have to agree on what they compute."""

    def watch(self, wake: Callable[[], None]) -> None:
        """See Executor."""
        for process in self._processes:
            watcher = threading.Thread(
                target=self._wake_at_end, args=(process, wake), name="rank-watch", daemon=True
            )
            watcher.start()
            self._watchers.append(watcher)

    def shutdown(self) -> None:
        """See Executor. Healthy ranks end by themselves; the others are killed."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        patience = _EXIT_SECONDS if self._failure is None else 0.0
        self._failure = self._failure or "the ranks were shut down"
        for process in self._processes:
            process.hang_up()
        for process in self._processes:
            process.end(patience)
        if self._watch is not None:
            self._watch.stop()
        for process in self._processes:
            process.free()
        if self._connector is not None:
            self._connector.close()
        for watcher in self._watchers:
            watcher.join()
        self._owned.close()

    def _wake_at_end(self, process: RankProcess, wake: Callable[[], None]) -> None:
        process.wait()
        if not self._is_shut_down:
            wake()

    def _start(self, settings: EngineSettings) -> None:
        size = settings.tensor_parallel_size
        self._owned = ExitStack()
        context = self._owned.enter_context(zmq.Context())
        folder = Path(tempfile.mkdtemp(prefix="kvbaton-ranks-"))
        with ExitStack() as started, closing(listen_for_ranks()) as store:
            started.callback(shutil.rmtree, folder, ignore_errors=True)
            calls = create_shared_file(ring_bytes(size, NUM_SLOTS, RING_SLOT_BYTES))
            started.callback(os.close, calls)
            self._calls = calls_ring(calls, size)
            self._owned.callback(self._calls.close)
            plan = GroupPlan(settings=settings, calls=calls, store=store, folder=folder)
            for rank in range(size):
                self._processes.append(RankProcess(rank, plan, context))
            store.close()
            self._gather("start", _JOIN_SECONDS)
            for process in self._processes:
                if not process.large.wait_connected(_JOIN_SECONDS):
                    self._fail(f"{process.name} did not connect its socket for large payloads")

    def _call_for_one(self, method: str) -> Any:
        """Results that must be equal on all ranks: the one."""
        first, *others = self.collective_rpc(method)
        if any(other != first for other in others):
            self._fail(f"the ranks differ in {method}: {[first, *others]}")
        return first

    def _ask(self, method: str, args: tuple[Any, ...], from_rank: int | None) -> None:
        """Make a call under way. from_rank: the one whose result is wanted; None: all."""
        payload = self._types.encode_call(method, args, from_rank)
        if self._failure is not None:
            raise WorkerLostError(self._failure)
        put(self._calls, [process.large for process in self._processes], payload)
        for process in self._processes:
            process.announce(is_step=method == "execute_model")

    def _gather(self, method: str, timeout_seconds: float) -> list[Returned]:
        """Every rank's answer to the call under way, in rank order."""
        outcomes = self._wait_for_all(method, timeout_seconds)
        returned = [outcome for outcome in outcomes if isinstance(outcome, Returned)]
        if len(returned) == len(outcomes):
            return returned
        for process, outcome in zip(self._processes, outcomes, strict=True):
            if isinstance(outcome, Raised):
                logger.error("%s raised in %s:\n%s", process.name, method, outcome.traceback)
        if lost := [outcome for outcome in outcomes if isinstance(outcome, str)]:
            self._fail("; ".join([*lost, *self._complaints(outcomes)]))
        raise self._error_of([outcome for outcome in outcomes if isinstance(outcome, Raised)], outcomes)

    def _wait_for_all(self, method: str, timeout_seconds: float) -> list[_Outcome]:
        silent = {process.doorbell.fileno(): process for process in self._processes}
        outcomes: dict[int, _Outcome] = {}
        deadline = time.monotonic() + timeout_seconds
        while silent and (ready := connection.wait(list(silent), max(0.0, deadline - time.monotonic()))):
            for descriptor in ready:
                process = silent.pop(cast(int, descriptor))
                answer = process.take_answer()
                outcomes[process.rank] = process.describe_end() if answer is None else answer
                if not isinstance(answer, Returned):
                    deadline = min(deadline, time.monotonic() + _OTHERS_SECONDS)
        for process in silent.values():
            outcomes[process.rank] = f"{process.name} has not answered {method}"
        return [outcomes[process.rank] for process in self._processes]

    def _complaints(self, outcomes: list[_Outcome]) -> list[str]:
        pairs = zip(self._processes, outcomes, strict=True)
        return [
            f"{process.name}: {answer.message}" for process, answer in pairs if isinstance(answer, Raised)
        ]

    def _error_of(self, raised: list[Raised], outcomes: list[_Outcome]) -> KvbatonError:
        """All ranks have answered: the group goes on. What all of them say alike is said once."""
        are_alike = len(raised) == len(outcomes) and len({answer.message for answer in raised}) == 1
        message = raised[0].message if are_alike else "; ".join(self._complaints(outcomes))
        error = error_from_kind(raised[0].kind, message)
        error.param = raised[0].param
        return error

    def _fail(self, what: str) -> NoReturn:
        self._failure = f"the engine's ranks cannot go on: {what}"
        raise WorkerLostError(self._failure)
