"""The rank processes of one engine: started, called, watched and ended together."""

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from multiprocessing import connection
from typing import NoReturn, cast

import zmq

from contract.errors import KvbatonError, WorkerLostError, error_from_kind
from contract.run_folder import RunFolder
from engine.distributed.channel import calls_ring, create_calls_file, write_message
from engine.distributed.messages import Raised, Returned, cause_of
from engine.distributed.process_group import listen_for_ranks
from engine.distributed.rank_process import GroupPlan, RankProcess
from engine.distributed.rank_watch import RankWatch
from engine.hosting.watching import LivenessTimeouts
from engine.settings import EngineSettings

logger = logging.getLogger(__name__)

_JOIN_SECONDS = 300.0
_OTHERS_SECONDS = 2.0
"""After one rank's failure: how long the others may take to answer before they count as stuck."""
_EXIT_SECONDS = 10.0

_Outcome = Returned | Raised | str
"""A rank's answer, or how its process ended or that it is silent."""


class RankPool:
    """Owns the rank processes and the ring of their calls. They have joined their group when the constructor returns.

    Every rank gets the same calls in the same order, so they make the same collectives in the same order. A rank that dies
    or does not answer breaks the pool for good: the call raises WorkerLostError, and so does every later one. Used from one
    thread.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.processes: list[RankProcess] = []
        self._failure: str | None = None
        self._is_ended = False
        self._end_threads: list[threading.Thread] = []
        self._watch: RankWatch | None = None
        self._owned = ExitStack()
        with ExitStack() as undo:
            undo.callback(self.end)
            self._start(settings)
            timeouts = LivenessTimeouts(settings.peer_timeout_seconds, settings.step_timeout_seconds)
            self._watch = RankWatch(self.processes, timeouts)
            self._watch.start()
            undo.pop_all()

    def call(self, payload: bytes, is_step: bool, *, is_answered: bool = True) -> None:
        """Send a call to all ranks; ``answers`` must follow if they answer it."""
        if self._failure is not None:
            raise WorkerLostError(self._failure)
        write_message(self._calls, [process.channel.large for process in self.processes], payload)
        for process in self.processes:
            process.announce(is_step, is_answered)

    def answers(self, method: str, timeout_seconds: float) -> list[Returned]:
        """Return every rank's answer to the last call, in rank order. Raises the same kind of error as a rank did."""
        outcomes = self._wait_for_all(method, timeout_seconds)
        returned = [outcome for outcome in outcomes if isinstance(outcome, Returned)]
        if len(returned) == len(outcomes):
            return returned
        for process, outcome in zip(self.processes, outcomes, strict=True):
            if isinstance(outcome, Raised):
                logger.error("%s raised in %s:\n%s", process.name, method, outcome.traceback)
        if lost := [outcome for outcome in outcomes if isinstance(outcome, str)]:
            self.fail("; ".join([*lost, *self._errors_by_rank(outcomes)]))
        raise self._error_of([outcome for outcome in outcomes if isinstance(outcome, Raised)], outcomes)

    def fail(self, why: str) -> NoReturn:
        """Break the pool, and raise WorkerLostError."""
        self._failure = f"the engine's ranks cannot go on: {why}"
        raise WorkerLostError(self._failure)

    def notify_at_end(self, wake: Callable[[], None]) -> None:
        """Call ``wake``, from another thread, when a rank has ended before ``end``."""
        for process in self.processes:
            thread = threading.Thread(
                target=self._wake_at_end, args=(process, wake), name="rank-watch", daemon=True
            )
            thread.start()
            self._end_threads.append(thread)

    def end(self) -> None:
        """End all ranks: healthy ones end by themselves, the others are killed. May be called twice."""
        if self._is_ended:
            return
        self._is_ended = True
        timeout_seconds = _EXIT_SECONDS if self._failure is None else 0.0
        self._failure = self._failure or "the ranks were shut down"
        for process in self.processes:
            process.ask_to_end()
        for process in self.processes:
            process.end(timeout_seconds)
        if self._watch is not None:
            self._watch.stop()
        for process in self.processes:
            process.free()
        for thread in self._end_threads:
            thread.join()
        self._owned.close()

    def _wake_at_end(self, process: RankProcess, wake: Callable[[], None]) -> None:
        process.wait()
        if not self._is_ended:
            wake()

    def _start(self, settings: EngineSettings) -> None:
        size = settings.tensor_parallel_size
        context = self._owned.enter_context(zmq.Context())
        with ExitStack() as started, closing(listen_for_ranks()) as store:
            folder = started.enter_context(RunFolder("ranks")).path
            calls = create_calls_file(size)
            started.callback(os.close, calls)
            self._calls = calls_ring(calls, size)
            self._owned.callback(self._calls.close)
            plan = GroupPlan(settings=settings, calls=calls, store=store, folder=folder)
            for rank in range(size):
                self.processes.append(RankProcess(rank, plan, context))
            store.close()
            self.answers("start", _JOIN_SECONDS)
            for process in self.processes:
                if not process.channel.large.wait_connected(_JOIN_SECONDS):
                    self.fail(f"{process.name} did not connect its socket for large payloads")

    def _wait_for_all(self, method: str, timeout_seconds: float) -> list[_Outcome]:
        silent = {process.channel.doorbell.fileno(): process for process in self.processes}
        outcomes: dict[int, _Outcome] = {}
        deadline = time.monotonic() + timeout_seconds
        while silent and (ready := connection.wait(list(silent), max(0.0, deadline - time.monotonic()))):
            for descriptor in ready:
                process = silent.pop(cast(int, descriptor))
                answer = process.channel.take_answer()
                outcomes[process.rank] = process.describe_end() if answer is None else answer
                if not isinstance(answer, Returned):
                    deadline = min(deadline, time.monotonic() + _OTHERS_SECONDS)
        for process in silent.values():
            outcomes[process.rank] = f"{process.name} has not answered {method}"
        return [outcomes[process.rank] for process in self.processes]

    def _errors_by_rank(self, outcomes: list[_Outcome]) -> list[str]:
        pairs = zip(self.processes, outcomes, strict=True)
        return [
            f"{process.name}: {answer.message}" for process, answer in pairs if isinstance(answer, Raised)
        ]

    def _error_of(self, raised: list[Raised], outcomes: list[_Outcome]) -> KvbatonError:
        """Return the error of a call that all ranks have answered. One message is enough if all ranks give the same."""
        are_alike = len(raised) == len(outcomes) and len({answer.message for answer in raised}) == 1
        message = raised[0].message if are_alike else "; ".join(self._errors_by_rank(outcomes))
        cause = cause_of(raised)
        error = error_from_kind(cause.kind, message)
        error.param = cause.param
        return error
