"""The rank processes of one engine: started, called, watched and ended together."""

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import NoReturn, cast

import msgspec
import zmq

from contract.errors import WorkerLostError, error_from_kind
from contract.processes import RunFolder
from engine.distributed.channel import RankChannel, calls_ring, create_ring_file, write_message
from engine.distributed.messages import Raised, RankPlan, Returned, cause_of
from engine.distributed.process_group import listen_for_ranks
from engine.distributed.rank_watch import RankWatch
from engine.hosting.watching import LivenessTimeouts
from engine.settings import EngineSettings

logger = logging.getLogger(__name__)

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from engine.distributed.rank_program import main; main(sys.argv[2], int(sys.argv[3]))"
)
_DESCRIBED_SECONDS = 5.0
# Answers without a call: the rank has joined its group.
_NUM_BEFORE_CALLS = 1
_JOIN_SECONDS = 300.0
# After one rank's failure: how long the others may take to answer before they count as stuck.
_OTHERS_SECONDS = 2.0
_EXIT_SECONDS = 10.0
# A rank's answer, or how its process ended or that it is silent.
_Outcome = Returned | Raised | str


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """The parameters that all rank processes of one engine share.

    calls: descriptor of the calls' ring. store: listening socket of rank 0's store. folder: for the sockets of large
    payloads, until all are connected.
    """

    settings: EngineSettings
    calls: int
    store: socket.socket
    folder: Path


class RankProcess:
    """A running rank. The kernel ends it with the thread that starts it.

    connector_descriptor: of the rank's end of the connector's socket, in the rank's process. Raises SettingError if the
    path of the temporary folder is too long for a socket.
    """

    def __init__(self, rank: int, plan: GroupPlan, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self.rank = rank
        self._size = plan.settings.tensor_parallel_size
        self._kill_reason = ""
        self._num_called = _NUM_BEFORE_CALLS
        self._last_step_call = 0
        with contextlib.ExitStack() as undo:
            self.channel = RankChannel(context, plan.folder / f"rank-{rank}")
            undo.callback(self.channel.close)
            self._connector_socket, theirs = socket.socketpair()
            undo.callback(self._connector_socket.close)
            with theirs:
                self.connector_descriptor = theirs.fileno()
                self._process = _start(
                    RankPlan(
                        rank=rank,
                        size=self._size,
                        settings=plan.settings,
                        calls=plan.calls,
                        **self.channel.descriptors._asdict(),
                        connector_socket=self.connector_descriptor,
                        large_address=self.channel.large_address,
                        store=plan.store.fileno() if rank == 0 else None,
                        store_port=plan.store.getsockname()[1],
                        log_level=logging.getLogger().getEffectiveLevel(),
                    )
                )
            self.channel.theirs.close()
            self._owned = undo.pop_all()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def name(self) -> str:
        """A name for messages: "rank 1 of 2 (process 4711)"."""
        return f"rank {self.rank} of {self._size} (process {self.pid})"

    @property
    def num_answered(self) -> int:
        """The number of calls that the process has answered."""
        return self.channel.num_answered

    @property
    def owes_step(self) -> bool:
        """True while a step is announced whose answer is not written."""
        return self.num_answered < self._last_step_call

    def announce(self, is_step: bool, is_answered: bool) -> None:
        """Wake the rank: a call was written into the calls' ring. is_step: the watch judges how long its answer takes."""
        self._num_called += is_answered
        if is_step:
            self._last_step_call = self._num_called
        self.channel.doorbell.ring()

    def detach_connector_socket(self) -> socket.socket:
        """Return our end of the connector's socket, which the caller owns from then on."""
        return socket.socket(fileno=self._connector_socket.detach())

    def describe_end(self) -> str:
        """Return how the process ended, once its doorbell's stream has ended. A process that runs on is killed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_DESCRIBED_SECONDS)
        if self._process.returncode is None:
            self._process.kill()
        code = self._process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"{self.name} {how}{f': {self._kill_reason}' if self._kill_reason else ''}"

    def kill(self, reason: str) -> None:
        """Kill the process, from any thread; ``describe_end`` gives the first reason."""
        self._kill_reason = self._kill_reason or reason
        self._process.kill()

    def wait(self) -> None:
        """Wait until the process has ended; from any thread."""
        self._process.wait()

    def end(self, timeout_seconds: float) -> None:
        """Wait for the process, and kill it after ``timeout_seconds``."""
        try:
            self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def free(self) -> None:
        """Free what belongs to the process, after ``end``; ``num_answered`` may not be read any more."""
        self._owned.close()


def _start(plan: RankPlan) -> "subprocess.Popen[bytes]":
    """Start a rank's program."""
    # Not by multiprocessing: the engine's process is a daemon there, which may have no children.
    inherited = [
        plan.doorbell,
        plan.calls,
        plan.answers,
        plan.tier_reports,
        plan.connector_socket,
        *([] if plan.store is None else [plan.store]),
    ]
    text = msgspec.json.encode(plan, enc_hook=lambda settings: settings.model_dump(mode="json")).decode()
    command = [sys.executable, "-P", "-c", _PROGRAM, json.dumps(sys.path), text, str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=inherited)


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

    @property
    def is_attentive(self) -> bool:
        """True if the ranks have read every call. Then one that is not answered does not fill the ring."""
        return not self._is_ended and self._calls.num_unread == 0

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
        raised = [outcome for outcome in outcomes if isinstance(outcome, Raised)]
        # One message is enough if all ranks give the same.
        are_alike = len(raised) == len(outcomes) and len({answer.message for answer in raised}) == 1
        cause = cause_of(raised)
        message = cause.message if are_alike else "; ".join(self._errors_by_rank(outcomes))
        error = error_from_kind(cause.kind, message)
        error.param = cause.param
        raise error

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
        # A rank whose doorbell is closed ends before it takes another call. All are asked before the first is waited for.
        for process in self.processes:
            process.channel.doorbell.close()
        for process in self.processes:
            process.end(timeout_seconds)
        if self._watch is not None:
            self._watch.stop()  # it reads the rings that are freed next
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
            calls = create_ring_file(size)
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
                answer = process.channel.receive_answer()
                outcomes[process.rank] = process.describe_end() if answer is None else answer
                # After one failure the others may wait in a collective for the rank that has failed.
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
