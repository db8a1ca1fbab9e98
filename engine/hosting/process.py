"""The engine-core process, and the end of it that its client holds.

The two talk over a pair of ZeroMQ sockets in a private 0700 directory, which is gone again once both are connected.
The process begins with a handshake (Ready or StartFailed), then runs the step loop; a thread reads its input. It dies
with its parent: the kernel kills it (Linux), and elsewhere the parent's closed pipe ends its loop.
"""

import asyncio
import contextlib
import ctypes
import gc
import logging
import multiprocessing
import multiprocessing.connection
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from contract.errors import SettingError
from engine.hosting.messages import FromEngine, Ping, Progress, Ready, Shutdown, Stopped, ToEngine
from engine.hosting.processor_time import processor_nanoseconds
from engine.hosting.running import EnginePlan, ProgressOf, run_engine
from engine.hosting.watching import EngineWatch, Patience
from engine.stepping.loop import Inbox

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_LOOKS_PER_PATIENCE = 6
_FLUSH_MILLISECONDS = 2000
_LAST_WORDS_SECONDS = 0.5
_SWITCH_SECONDS = 0.00005
"""How long a thread may keep Python's lock while another waits: one that moves KV takes it again and again."""


@dataclass(frozen=True)
class Sockets:
    """The addresses of one engine process, both bound by its client."""

    to_engine: str
    from_engine: str

    @classmethod
    def within(cls, folder: Path) -> "Sockets":
        """Unix sockets in this folder."""
        return cls(f"ipc://{folder}/in", f"ipc://{folder}/out")


class EngineProcess:
    """An ``EngineLink`` to a core in a process of its own.

    Start it from a thread that lives as long as the engine shall (the main thread): on Linux the engine is killed
    when the thread that started it ends. The sockets' folder is made ``within`` the system's temporary one, or another;
    raises SettingError where its path is too long for a socket.
    """

    def __init__(self, plan: EnginePlan, within: Path | None = None) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="kvbaton-engine-", dir=within))
        sockets = Sockets.within(self._folder)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._input = self._context.socket(zmq.PUSH)
        self._input.setsockopt(zmq.SNDHWM, 0)
        self._output = zmq.asyncio.Context(self._context).socket(zmq.PULL)
        self._output.setsockopt(zmq.RCVHWM, 0)
        self._bind(sockets)
        self.process = multiprocessing.get_context("spawn").Process(
            target=engine_main, args=(plan, sockets), name="engine-core", daemon=True
        )
        self._encoder = msgspec.msgpack.Encoder()
        self._exited = asyncio.Event()
        self._ended_as_asked = False
        self._patience = Patience(plan.settings.peer_timeout_seconds, plan.settings.step_timeout_seconds)
        self._watch: EngineWatch | None = None
        self._watching: asyncio.Task[None] | None = None

    def start(self, hear: Callable[[FromEngine], None]) -> None:
        """See EngineLink."""
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as undo:
            undo.callback(self._free)
            self.process.start()
            undo.pop_all()
        loop.add_reader(self.process.sentinel, self._note_exit, loop)
        self._reader = loop.create_task(self._read(hear))

    @property
    def complaint(self) -> str | None:
        """See EngineLink. It begins when half of the patience is used up."""
        return self._watch.complaint(time.monotonic(), share=0.5) if self._watch else None

    def send(self, message: ToEngine) -> None:
        """See EngineLink."""
        if self._input.closed:
            return
        with contextlib.suppress(zmq.Again):
            self._input.send(self._encoder.encode(message), zmq.NOBLOCK)

    def abandon(self) -> None:
        """See EngineLink."""
        self.process.kill()

    async def wait_ended(self) -> bool:
        """See EngineLink."""
        exited = asyncio.ensure_future(self._exited.wait())
        try:
            await asyncio.wait({exited, self._reader}, return_when=asyncio.FIRST_COMPLETED)
            if self._reader.done() and self._reader.exception() is not None:
                self.process.kill()
            await exited
            await asyncio.wait({self._reader}, timeout=_LAST_WORDS_SECONDS)
        finally:
            exited.cancel()
            self._reader.cancel()
            if self._watching is not None:
                self._watching.cancel()
            self._free()
        self.process.join()
        return self._ended_as_asked and self.process.exitcode == 0

    def _bind(self, sockets: Sockets) -> None:
        try:
            self._input.bind(sockets.to_engine)
            self._output.bind(sockets.from_engine)
        except zmq.ZMQError as error:
            self._free()
            raise SettingError(
                f"the engine's sockets cannot be made in {self._folder}: {error.strerror}; "
                "set TMPDIR to another (shorter) folder",
                param="TMPDIR",
            ) from error

    async def _read(self, hear: Callable[[FromEngine], None]) -> None:
        """Until the engine's last message. The first one completes the handshake."""
        decoder = msgspec.msgpack.Decoder(FromEngine)
        while True:
            message = decoder.decode(await self._output.recv())
            match message:
                case Ready():
                    await self._until_input_is_connected()
                    self._remove_folder()
                    self._watch = EngineWatch(self._patience, time.monotonic())
                    self._watching = asyncio.ensure_future(self._keep_watch(self._watch, hear))
                case Progress(counts) if self._watch is not None:
                    self._watch.answered(counts, time.monotonic())
                    continue
                case Stopped(error):
                    self._ended_as_asked = error is None
            hear(message)
            if isinstance(message, Stopped):
                return

    async def _keep_watch(self, watch: EngineWatch, hear: Callable[[FromEngine], None]) -> None:
        """Ask for signs of life until the engine has ended. One that gives none is killed: it can never wake up again."""
        interval = min(self._patience.stopped_seconds, self._patience.hung_seconds) / _LOOKS_PER_PATIENCE
        looked_at = time.monotonic()
        while True:
            self.send(Ping())
            await asyncio.sleep(interval)
            now = time.monotonic()
            if now - looked_at > 2 * interval:
                watch.was_away(now)
            looked_at = now
            watch.ran(processor_nanoseconds(self.process.pid or 0), now)
            reason = watch.complaint(now)
            if reason is not None:
                logger.error("the engine (process %s) is killed: %s", self.process.pid, reason)
                hear(Stopped(reason))
                self.process.kill()
                return

    async def _until_input_is_connected(self) -> None:
        """The engine connects both sockets at once, but they get there one after the other."""
        poller = zmq.asyncio.Poller()
        poller.register(self._input, zmq.POLLOUT)
        await poller.poll()

    def _note_exit(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.remove_reader(self.process.sentinel)
        self._exited.set()

    def _free(self) -> None:
        self._remove_folder()
        self._input.close(linger=0)
        self._output.close(linger=0)
        self._context.term()

    def _remove_folder(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def engine_main(plan: EnginePlan, sockets: Sockets) -> None:
    """The process: connect, run the engine, exit with 0 when it ended as asked and with 1 otherwise."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent()
    sys.setswitchinterval(_SWITCH_SECONDS)
    plan.prepare()
    inbox = Inbox()
    encoder = msgspec.msgpack.Encoder()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    output = context.socket(zmq.PUSH)
    output.setsockopt(zmq.SNDHWM, 0)
    output.setsockopt(zmq.LINGER, _FLUSH_MILLISECONDS)
    output.connect(sockets.from_engine)
    reader = _InputThread(context, sockets, inbox)
    reader.start()
    threading.Thread(target=_watch_parent, args=(inbox,), daemon=True).start()

    def emit(message: FromEngine) -> None:
        if isinstance(message, Ready):
            _settle()
        output.send(encoder.encode(message))

    try:
        has_ended_well = run_engine(plan, inbox, emit, reader.show)
    finally:
        output.close()
        context.term()
    sys.exit(0 if has_ended_well else 1)


def _settle() -> None:
    """What is here stays: no garbage collection looks at it any more, which would take a tenth of a second from a step."""
    gc.collect()
    gc.freeze()


class _InputThread(threading.Thread):
    """Takes the input from the socket to the queue, until the context ends. Broken input ends the engine, not this.

    It also sends what the threads that work have counted. That this thread answers is no sign of their life.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", sockets: Sockets, inbox: Inbox) -> None:
        super().__init__(name="engine-input", daemon=True)
        self._context = context
        self._sockets = sockets
        self._inbox = inbox
        self._progress: ProgressOf | None = None

    def show(self, progress: ProgressOf) -> None:
        """Send this on request from now on."""
        self._progress = progress

    def run(self) -> None:
        """See the class."""
        decoder = msgspec.msgpack.Decoder(ToEngine)
        encoder = msgspec.msgpack.Encoder()
        with (
            self._context.socket(zmq.PUSH) as answers,
            self._context.socket(zmq.PULL) as socket,
            contextlib.suppress(zmq.ContextTerminated),
        ):
            answers.setsockopt(zmq.LINGER, 0)
            answers.connect(
                self._sockets.from_engine
            )  # before the input, whose connection shows that both stand
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.connect(self._sockets.to_engine)
            while True:
                try:
                    message = decoder.decode(socket.recv())
                except msgspec.DecodeError as error:
                    self._inbox.put(error)
                    continue
                self._inbox.put(message)
                if isinstance(message, Ping) and self._progress is not None:
                    with contextlib.suppress(zmq.Again):
                        answers.send(encoder.encode(Progress(self._progress())), zmq.NOBLOCK)


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch_parent(inbox: Inbox) -> None:
    """End the loop when the parent is gone (also if it went before the kernel was asked to tell)."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        inbox.put(Shutdown())
