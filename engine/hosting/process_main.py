"""The engine-core process itself: connect, run the step loop, while a thread reads the input."""

import contextlib
import gc
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading

import msgspec
import zmq

from contract.decoding import msgpack_decoder
from contract.processes import die_with_parent
from engine.hosting.messages import Addresses, FromEngine, Ping, Progress, Ready, Shutdown, ToEngine
from engine.hosting.running import EnginePlan, run_engine
from engine.stepping.loop import Inbox, StepLoop

_FLUSH_MILLISECONDS = 2000
# The longest time in which a thread may hold the GIL while another waits; a thread that moves KV takes it repeatedly.
_SWITCH_SECONDS = 0.00005


def engine_main(plan: EnginePlan, addresses: Addresses) -> None:
    """Connect, run the engine, and exit with 0 if it ended as asked, else with 1.

    The process ends without the end of its interpreter, which takes 0.3 s and more with torch loaded: everything that
    outlives a process is closed by then.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the parent ends the engine, after its drain
    if (parent := multiprocessing.parent_process()) is not None and parent.pid is not None:
        die_with_parent(parent.pid)
    sys.setswitchinterval(_SWITCH_SECONDS)
    plan.prepare()
    inbox = Inbox()
    encoder = msgspec.msgpack.Encoder()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    output = context.socket(zmq.PUSH)
    output.setsockopt(zmq.SNDHWM, 0)
    output.setsockopt(zmq.LINGER, _FLUSH_MILLISECONDS)
    output.connect(addresses.from_engine)
    reader = _InputThread(context, addresses, inbox)
    reader.start()
    threading.Thread(target=_watch_parent, args=(inbox,), daemon=True).start()

    def emit(message: FromEngine) -> None:
        if isinstance(message, Ready):
            # What is there now stays: collecting it again and again would take a tenth of a second from a step.
            gc.collect()
            gc.freeze()
        output.send(encoder.encode(message))

    try:
        has_ended_well = run_engine(plan, inbox, emit, reader.begin_with)
    finally:
        output.close()
        context.term()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if has_ended_well else 1)


class _InputThread(threading.Thread):
    """Moves messages from the socket to the inbox, until the context ends. Broken input ends the engine, not the thread.

    It also begins with requests that wait there for the end of a step, and sends the counts of the working threads. Its own
    answers are no sign of their life.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", addresses: Addresses, inbox: Inbox) -> None:
        super().__init__(name="engine-input", daemon=True)
        self._context = context
        self._addresses = addresses
        self._inbox = inbox
        self._loop: StepLoop | None = None

    def begin_with(self, loop: StepLoop) -> None:
        """Let this loop expect messages, and send its counts on each Ping, from now on."""
        self._loop = loop

    def run(self) -> None:
        """Read until the context ends."""
        decoder: msgspec.msgpack.Decoder[ToEngine] = msgpack_decoder(ToEngine)
        encoder = msgspec.msgpack.Encoder()
        with (
            self._context.socket(zmq.PUSH) as answers,
            self._context.socket(zmq.PULL) as socket,
            contextlib.suppress(zmq.ContextTerminated),
        ):
            answers.setsockopt(zmq.LINGER, 0)
            # Before the input: the client takes that one's connection as a sign of both.
            answers.connect(self._addresses.from_engine)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.connect(self._addresses.to_engine)
            while True:
                try:
                    message = decoder.decode(socket.recv())
                except (
                    msgspec.DecodeError
                ) as error:  # raised by the step loop, in the thread that can end the engine
                    self._inbox.put(error)
                    continue
                if self._loop is not None:
                    self._loop.expect(message)
                self._inbox.put(message)
                if isinstance(message, Ping) and self._loop is not None:
                    with contextlib.suppress(zmq.Again):
                        answers.send(encoder.encode(Progress(self._loop.progress())), zmq.NOBLOCK)


def _watch_parent(inbox: Inbox) -> None:
    """End the loop when the parent is gone, on systems where the kernel does not end its children."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        inbox.put(Shutdown())
