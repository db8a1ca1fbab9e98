"""An engine core in a process of its own, as its client sees it, and the client's ends of the two ZeroMQ sockets to it.

Both sockets lie in a private 0700 directory, which is removed once the engine has connected. The process begins with a
handshake (Ready or StartFailed), then runs the step loop (``engine.hosting.process_main``). It ends with its parent: the
kernel kills it (Linux), and elsewhere the parent's closed pipe ends its loop.
"""

import asyncio
import contextlib
import logging
import multiprocessing
import signal
import time
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from contract.decoding import msgpack_decoder
from contract.errors import SettingError
from contract.processes import RunFolder, remove_stale
from engine.hosting.messages import Addresses, FromEngine, Ping, Progress, Ready, Stopped, ToEngine
from engine.hosting.process_main import engine_main
from engine.hosting.running import EnginePlan
from engine.hosting.watching import EngineWatch, LivenessTimeouts, processor_nanoseconds, queued_nanoseconds

logger = logging.getLogger(__name__)

_CHECKS_PER_TIMEOUT = 6
LAST_MESSAGES_SECONDS = 0.5
"""The time limit of the wait for the last messages of an engine that has ended."""
# A process that was killed ends at once, unless the kernel frees much memory.
_KILL_SECONDS = 5.0
# The temporary folders that an engine's process makes: for its ranks' channels, the sockets that share its pool, the memory
# of its data-parallel group, and the socket at which further clients attach.
_FOLDERS = ("ranks", "shm", "group", "shared")


class ClientSockets:
    """The client's ends of the sockets, bound when the constructor returns.

    within: where to make the sockets' folder; None: in the system's temporary one. max_unread: the number of messages that
    may wait here to be received; 0: no bound. Raises SettingError if the folder's path is too long for a socket.
    """

    def __init__(self, within: Path | None = None, max_unread: int = 0) -> None:
        self._folder = RunFolder("engine", within)
        self.addresses = Addresses.within(self._folder.path)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._input = self._context.socket(zmq.PUSH)
        # No bound: a full queue would drop requests, or block the event loop.
        self._input.setsockopt(zmq.SNDHWM, 0)
        self._output = zmq.asyncio.Context(self._context).socket(zmq.PULL)
        self._output.setsockopt(zmq.RCVHWM, max_unread)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgpack_decoder(FromEngine)
        try:
            self._input.bind(self.addresses.to_engine)
            self._output.bind(self.addresses.from_engine)
        except zmq.ZMQError as error:
            self.close()
            raise SettingError(
                f"the engine's sockets cannot be made in {self._folder.path}: {error.strerror}; "
                "set TMPDIR to another (shorter) folder",
                param="TMPDIR",
            ) from error

    def send(self, message: ToEngine) -> None:
        """Send a message without blocking; drop it if the sockets are closed."""
        if self._input.closed:
            return
        with contextlib.suppress(zmq.Again):
            self._input.send(self._encoder.encode(message), zmq.NOBLOCK)

    @property
    def folder(self) -> Path:
        """The folder of the sockets."""
        return self._folder.path

    async def receive(self) -> FromEngine:
        """Return the engine's next message."""
        message: FromEngine = self._decoder.decode(await self._output.recv())
        return message

    async def wait_connected(self) -> None:
        """Wait until the engine, whose first message has come, is connected for input too; then remove the folder."""
        # The engine connects both sockets at once, but the connections are made one after the other.
        poller = zmq.asyncio.Poller()
        poller.register(self._input, zmq.POLLOUT)
        await poller.poll()
        self._folder.close()

    def close(self) -> None:
        """Close both sockets, and remove their folder. May be called twice."""
        self._folder.close()
        self._input.close(linger=0)
        self._output.close(linger=0)
        self._context.term()


class EngineProcess:
    """An ``EngineLink`` to a core in a process of its own.

    Start it from a thread that lives as long as the engine (the main thread): on Linux the engine is killed
    when the thread that started it ends. within: see ClientSockets.
    """

    def __init__(self, plan: EnginePlan, within: Path | None = None) -> None:
        self._sockets = ClientSockets(within)
        self.process = multiprocessing.get_context("spawn").Process(
            target=engine_main, args=(plan, self._sockets.addresses), name="engine-core", daemon=True
        )
        self._exited = asyncio.Event()
        self._has_stopped_as_asked = False
        self._timeouts = LivenessTimeouts(
            plan.settings.peer_timeout_seconds, plan.settings.step_timeout_seconds
        )
        self._watch: EngineWatch | None = None
        self._watching: asyncio.Task[None] | None = None

    def start(self, receive: Callable[[FromEngine], None]) -> None:
        """Start the process; see EngineLink."""
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as undo:
            undo.callback(self._sockets.close)
            # The engine inherits the mask: a signal to a whole group stops its parent alone, which needs it for its drain.
            resource_tracker.ensure_running()  # its start would undo the mask
            earlier = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
            try:
                self.process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, earlier)
            undo.pop_all()
        loop.add_reader(self.process.sentinel, self._note_exit, loop)
        self._reader = loop.create_task(self._read(receive))

    @property
    def complaint(self) -> str | None:
        """See EngineLink. It begins when half of a time limit is used up."""
        return self._watch.complaint(time.monotonic(), share=0.5) if self._watch else None

    def send(self, message: ToEngine) -> None:
        """Send a message; see EngineLink."""
        self._sockets.send(message)

    def abandon(self) -> None:
        """Kill the process, which has not started yet; see EngineLink."""
        self.process.kill()
        # Here: the loop may be closed, and ``wait_ended`` cancelled, before its end is noticed.
        self.process.join(_KILL_SECONDS)
        self._remove_left()

    async def wait_ended(self) -> bool:
        """Wait until the process has exited; see EngineLink."""
        exited = asyncio.ensure_future(self._exited.wait())
        try:
            await asyncio.wait({exited, self._reader}, return_when=asyncio.FIRST_COMPLETED)
            if self._reader.done() and self._reader.exception() is not None:
                self.process.kill()
            await exited
            # Its last messages may still lie in the socket, but a killed engine has no last one to wait for.
            await asyncio.wait({self._reader}, timeout=LAST_MESSAGES_SECONDS)
        finally:
            exited.cancel()
            self._reader.cancel()
            if self._watching is not None:
                self._watching.cancel()
            self._sockets.close()
        self.process.join()
        if self.process.exitcode:
            self._remove_left()
        return self._has_stopped_as_asked and self.process.exitcode == 0

    def _remove_left(self) -> None:
        """Remove the folders of a process that was killed, which could not do so."""
        for kind in _FOLDERS:
            remove_stale(kind)

    async def _read(self, receive: Callable[[FromEngine], None]) -> None:
        """Receive messages until the engine's last one. The first one completes the handshake."""
        while True:
            message = await self._sockets.receive()
            match message:
                case Ready():
                    await self._sockets.wait_connected()
                    self._watch = EngineWatch(self._timeouts, time.monotonic())
                    self._watching = asyncio.ensure_future(self._keep_watch(self._watch, receive))
                case Progress(counts) if self._watch is not None:
                    self._watch.on_answer(counts, time.monotonic())
                    continue
                case Stopped(error):
                    self._has_stopped_as_asked = error is None
            receive(message)
            if isinstance(message, Stopped):
                return

    async def _keep_watch(self, watch: EngineWatch, receive: Callable[[FromEngine], None]) -> None:
        """Ask for signs of life until the engine has ended. Kill one that gives none: it cannot recover."""
        interval = min(self._timeouts.stopped_seconds, self._timeouts.hung_seconds) / _CHECKS_PER_TIMEOUT
        checked_at = time.monotonic()
        while True:
            self.send(Ping())
            await asyncio.sleep(interval)
            now = time.monotonic()
            # This process was stopped itself, or starved: then it has not seen the signs of life.
            if now - checked_at > 2 * interval:
                watch.was_away(now)
            checked_at = now
            pid = self.process.pid or 0
            watch.ran(processor_nanoseconds(pid), now, queued_nanoseconds(pid))
            reason = watch.complaint(now)
            if reason is not None:
                logger.error("the engine (process %s) is killed: %s", self.process.pid, reason)
                receive(Stopped(reason))
                self.process.kill()
                return

    def _note_exit(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.remove_reader(self.process.sentinel)
        self._exited.set()
