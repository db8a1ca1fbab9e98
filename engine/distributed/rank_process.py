"""One rank process, as its executor holds it."""

import contextlib
import json
import logging
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import zmq

from engine.distributed.channel import RankChannel
from engine.distributed.messages import RankPlan, encode_plan
from engine.settings import EngineSettings

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from engine.distributed.rank_program import main; main(sys.argv[2])"
)
_EXIT_SECONDS = 5.0
_NUM_BEFORE_CALLS = 1
"""Answers without a call: the rank has joined its group."""


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
                self._process = _start(self._rank_plan(plan))
            self.channel.close_theirs()
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

    def take_connector_socket(self) -> socket.socket:
        """Return our end of the connector's socket, which the caller owns from then on."""
        return socket.socket(fileno=self._connector_socket.detach())

    def describe_end(self) -> str:
        """Return how the process ended, once its doorbell's stream has ended. A process that runs on is killed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_SECONDS)
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

    def ask_to_end(self) -> None:
        """Have the process end before it takes another call."""
        self.channel.doorbell.close()

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

    def _rank_plan(self, plan: GroupPlan) -> RankPlan:
        return RankPlan(
            rank=self.rank,
            size=self._size,
            settings=plan.settings,
            doorbell=self.channel.their_doorbell,
            calls=plan.calls,
            answers=self.channel.their_answers,
            connector_socket=self.connector_descriptor,
            large_address=self.channel.large_address,
            store=plan.store.fileno() if self.rank == 0 else None,
            store_port=plan.store.getsockname()[1],
            log_level=logging.getLogger().getEffectiveLevel(),
        )


def _start(plan: RankPlan) -> "subprocess.Popen[bytes]":
    """Start a rank's program. multiprocessing cannot: an engine's process is a daemon there, which may have no children."""
    inherited = [
        plan.doorbell,
        plan.calls,
        plan.answers,
        plan.connector_socket,
        *([] if plan.store is None else [plan.store]),
    ]
    command = [sys.executable, "-P", "-c", _PROGRAM, json.dumps(sys.path), encode_plan(plan)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=inherited)
