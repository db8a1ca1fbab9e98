"""One rank process, as its executor holds it."""

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from contract.errors import SettingError
from engine.distributed.channel import NUM_SLOTS, RING_SLOT_BYTES, Doorbell, LargeLine, answers_ring, get
from engine.distributed.messages import Answer, RankPlan, encode_plan
from engine.distributed.ring import create_shared_file, ring_bytes
from engine.settings import EngineSettings

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from engine.distributed.program import main; main(sys.argv[2])"
)
_EXIT_SECONDS = 5.0
_NUM_BEFORE_CALLS = 1
"""Answers without a call: that the group stands."""


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """What all rank processes of one engine have in common.

    calls: descriptor of the calls' ring. store: listening socket of rank 0's store. folder: for the sockets of large
    payloads, until all are connected.
    """

    settings: EngineSettings
    calls: int
    store: socket.socket
    folder: Path


class RankProcess:
    """A running rank. Start it from a thread that lives as long as the rank shall: the kernel ends it with the thread.

    line_descriptor: a number in the rank's process. Raises SettingError where the temporary folder's path is too long for
    a socket.
    """

    def __init__(self, rank: int, plan: GroupPlan, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self.rank = rank
        self._killed_for = ""
        self._num_asked = _NUM_BEFORE_CALLS
        self._num_judged = 0
        self._name = f"rank {rank} of {plan.settings.tensor_parallel_size}"
        self._decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as theirs:
            end = undo.enter_context(context.socket(zmq.PAIR))
            self.large = LargeLine(end)
            address = _bind(end, plan.folder / f"rank-{rank}")
            our_bell, their_bell = socket.socketpair()
            theirs.callback(their_bell.close)
            self.doorbell = Doorbell(our_bell)
            undo.callback(self.doorbell.close)
            self._line, their_line = socket.socketpair()
            theirs.callback(their_line.close)
            undo.callback(self._line.close)
            self.line_descriptor = their_line.fileno()
            descriptor = create_shared_file(ring_bytes(1, NUM_SLOTS, RING_SLOT_BYTES))
            theirs.callback(os.close, descriptor)
            self._answers = answers_ring(descriptor)
            undo.callback(self._answers.close)
            self._process = _start(
                RankPlan(
                    rank=rank,
                    size=plan.settings.tensor_parallel_size,
                    settings=plan.settings,
                    doorbell=their_bell.fileno(),
                    calls=plan.calls,
                    answers=descriptor,
                    line=self.line_descriptor,
                    large_address=address,
                    store=plan.store.fileno() if rank == 0 else None,
                    store_port=plan.store.getsockname()[1],
                    log_level=logging.getLogger().getEffectiveLevel(),
                )
            )
            self._owned = undo.pop_all()

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    @property
    def name(self) -> str:
        """For messages: "rank 1 of 2 (process 4711)"."""
        return f"{self._name} (process {self.pid})"

    @property
    def num_answered(self) -> int:
        """How many answers its loop of calls has written; whether they were taken does not matter."""
        return self._answers.num_written

    @property
    def owes_step(self) -> bool:
        """A step was announced whose answer is not written."""
        return self.num_answered < self._num_judged

    def announce(self, is_step: bool) -> None:
        """Wake the rank: a call has been put into the calls' ring. is_step: how long it takes is judged by its progress."""
        self._num_asked += 1
        if is_step:
            self._num_judged = self._num_asked
        self.doorbell.ring()

    def take_line(self) -> socket.socket:
        """Our end of the line for the rank's half of a connector, which the caller owns; there it is ``line_descriptor``."""
        return socket.socket(fileno=self._line.detach())

    def take_answer(self) -> Answer | None:
        """The answer that the doorbell announces; None when the process has ended instead."""
        if not self.doorbell.take():
            return None
        return self._decoder.decode(get(self._answers, 0, self.large))

    def describe_end(self) -> str:
        """How the process ended, after ``take_answer`` gave None. A process that only hung up is killed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_SECONDS)
        if self._process.returncode is None:
            self._process.kill()
        code = self._process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"{self.name} {how}{f': {self._killed_for}' if self._killed_for else ''}"

    def kill(self, reason: str) -> None:
        """Kill the process, from any thread; ``reason`` is told with its end."""
        self._killed_for = self._killed_for or reason
        self._process.kill()

    def wait(self) -> None:
        """Until the process has ended; from any thread."""
        self._process.wait()

    def hang_up(self) -> None:
        """Ask the process to end: it does so before it takes another call."""
        self.doorbell.close()

    def end(self, patience_seconds: float) -> None:
        """Wait for the process, and kill it after ``patience_seconds``."""
        try:
            self._process.wait(patience_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def free(self) -> None:
        """Free what belongs to the process, after ``end``; nobody may look at its answers any more."""
        self._owned.close()


def _bind(end: "zmq.Socket[bytes]", path: Path) -> str:
    address = f"ipc://{path}"
    try:
        end.bind(address)
    except zmq.ZMQError as error:
        raise SettingError(
            f"the ranks' sockets cannot be made in {path.parent}: {error.strerror}; "
            "set TMPDIR to another (shorter) folder",
            param="TMPDIR",
        ) from error
    return address


def _start(plan: RankPlan) -> "subprocess.Popen[bytes]":
    """Not by multiprocessing: an engine's own process is a daemon there, which may have no children."""
    inherited = [
        plan.doorbell,
        plan.calls,
        plan.answers,
        plan.line,
        *([] if plan.store is None else [plan.store]),
    ]
    command = [sys.executable, "-P", "-c", _PROGRAM, json.dumps(sys.path), encode_plan(plan)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=inherited)
