"""The program of a rank process: it joins the group, then carries out calls on the runner until the engine ends it."""

import contextlib
import logging
import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection

import msgspec
import torch
import zmq

from contract.decoding import json_decoder, msgpack_decoder
from contract.errors import ErrorKind, KvbatonError
from contract.processes import die_with_parent
from engine.distributed.channel import (
    Doorbell,
    LargeSocket,
    answers_ring,
    calls_ring,
    read_message,
    write_message,
)
from engine.distributed.group import rank_device
from engine.distributed.messages import (
    Answer,
    MethodTypes,
    Raised,
    RankCall,
    RankPlan,
    RankRunner,
    Returned,
)
from engine.distributed.process_group import (
    SymmetricSums,
    TorchRankGroup,
    check_device,
    find_library,
    open_store,
)
from engine.distributed.rank_watch import beat
from engine.settings import EngineSettings


class RankLoop:
    """The rank's end of the channel, and its runner."""

    def __init__(self, plan: RankPlan, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self._plan = plan
        self._doorbell = Doorbell(socket.socket(fileno=plan.doorbell))
        self._calls = calls_ring(plan.calls, plan.size)
        self._answers = answers_ring(plan.answers)
        os.close(plan.calls)  # the rings have mapped them
        os.close(plan.answers)
        end = context.socket(zmq.PAIR)
        self._large = LargeSocket(end)
        end.connect(plan.large_address)
        self._decoder: msgspec.msgpack.Decoder[RankCall] = msgpack_decoder(RankCall)
        self._types = MethodTypes()
        self._runner: RankRunner | None = None

    def run(self) -> None:
        """Join the group, report the outcome, then answer each call until the engine closes the channel."""
        self._send(_run_guarded(self._begin))
        failed: Raised | None = None
        while self._doorbell.wait():
            call = self._decoder.decode(read_message(self._calls, self._plan.rank, self._large))
            answer = failed or _run_guarded(partial(self._carry_out, call))
            failed = None
            if call.is_answered:
                self._send(answer)
            # The executor does not read an error now: it is the answer to the next call.
            elif isinstance(answer, Raised):
                failed = answer

    def close(self) -> None:
        """Free everything."""
        if self._runner is not None:
            self._runner.shutdown()
        self._large.close()
        self._doorbell.close()
        self._calls.close()
        self._answers.close()

    def _begin(self) -> Returned:
        reports = Connection(self._plan.tier_reports, readable=False)
        self._runner = RankRunner(self._plan.settings, _join(self._plan), reports)
        return Returned()

    def _carry_out(self, call: RankCall) -> Returned:
        value = getattr(self._runner, call.method)(*self._types.decode_arguments(call))
        if call.from_rank not in (None, self._plan.rank):
            return Returned()
        return Returned(msgspec.msgpack.encode(value))

    def _send(self, answer: Answer) -> None:
        write_message(self._answers, [self._large], msgspec.msgpack.encode(answer))
        self._doorbell.ring()


def _run_guarded(action: Callable[[], Returned]) -> Answer:
    """Run an action; what it raises becomes an answer. This is the boundary of a rank."""
    try:
        return action()
    except KvbatonError as error:
        return Raised(error.kind.value, error.message, error.param, traceback.format_exc())
    except Exception as error:  # noqa: BLE001 the rank's one boundary
        return Raised(ErrorKind.INTERNAL.value, repr(error), None, traceback.format_exc())


def _join(plan: RankPlan) -> TorchRankGroup:
    """Join the other ranks. Raises if they do not come in time, and SettingError without enough devices."""
    device = rank_device(plan.settings.device, torch.cuda.device_count(), plan.rank, plan.size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    is_symmetric = plan.settings.all_reduce == "symmetric"
    if is_symmetric:
        # Before the ranks connect: one that gave up after it would break the connections of the others.
        check_device(device)
    timeout = timedelta(seconds=plan.settings.rank_timeout_seconds)
    listening = None if plan.store is None else socket.socket(fileno=plan.store)
    store = open_store(listening, plan.store_port, plan.size)
    group = TorchRankGroup(device, plan.rank, plan.size, store, timeout)
    if is_symmetric:
        library = find_library(device, group.backend)
        group.sums = SymmetricSums(library, device, plan.rank, plan.size, store)
    return group


def main(plan_text: str, parent_pid: int) -> None:
    """Run the process, a child of ``parent_pid``, until the engine closes the channel or dies."""
    # Of a terminal, or of a service manager: the parent ends the ranks.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(parent_pid)  # on Linux; elsewhere it ends after its call, by the doorbell
    plan: RankPlan = json_decoder(RankPlan, lambda _, values: EngineSettings(**values)).decode(plan_text)
    logging.basicConfig(
        level=plan.log_level, format=f"%(asctime)s rank {plan.rank} %(levelname)s %(name)s: %(message)s"
    )
    is_over = threading.Event()
    beat(plan.settings.peer_timeout_seconds, is_over)
    with zmq.Context() as context, contextlib.closing(RankLoop(plan, context)) as loop:
        loop.run()
    is_over.set()
