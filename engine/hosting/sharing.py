"""Further clients of an engine that one client has started, each a process of the same user, with an index of its own.

The engine listens on a Unix socket in a private 0700 folder. A client connects there, names the folder of its own two ZeroMQ
sockets (``engine.attaching``), and keeps the connection. The operating system closes it when either process dies, so its end
means that the client has left, or that the engine has ended. Once a client is connected:

1. The thread of ``_Door`` reads the client's messages, and has the step loop apply each.
2. ``_FurtherClient`` applies them in the step loop. There it gives the client's requests its index and names of its own, so
   that requests of two clients never collide and no client can name another's.
3. The step loop passes outputs to the ``emit`` of the client that they are for, without blocking.

An engine that is not shared has neither the thread nor the socket.
"""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import zmq
from msgspec import structs

from contract.decoding import DECODING_ERRORS, msgpack_decoder
from contract.errors import ErrorKind, InvalidRequestError, SettingError
from contract.processes import RunFolder
from contract.requests import EngineRequest
from engine.core import EngineCore
from engine.hosting.messages import (
    Abort,
    AbortRequest,
    AddRequest,
    Addresses,
    Call,
    CallResult,
    FromEngine,
    Prepare,
    Ready,
    Share,
    Shutdown,
    StepOutputs,
    ToEngine,
    UntilFree,
)
from engine.stepping.loop import OWNER, Dispatch, Emits, Inbox

logger = logging.getLogger(__name__)

MAX_UNREAD = 2048
"""The number of messages that may wait for a further client: about ten seconds of steps."""
DOOR = "door"
"""The name of the listening socket in its folder."""
_READING_CALLS = ("stats", "debug_state", "counters", "pid", "check_integrity")
_MAX_LINE_BYTES = 4096
_FLUSH_MILLISECONDS = 2000


class Sharing:
    """Lets further clients attach to an engine, once its first client has asked for that. Used in the step loop.

    emits: the ways to the engine's clients. max_unread: see EnginePlan.
    """

    def __init__(self, inbox: Inbox, emits: Emits, max_unread: int) -> None:
        self._inbox = inbox
        self._emits = emits
        self._max_unread = max_unread
        self._door: _Door | None = None

    def share(self, core: EngineCore, dispatch: Dispatch) -> str:
        """Return the folder at which clients attach; the same one each time.

        Raises SettingError if the temporary folder's path is too long for a socket.
        """
        if self._door is None:
            indices = count(OWNER + 1)

            def make(lifeline: socket.socket, output: "zmq.Socket[bytes]") -> _FurtherClient:
                output.setsockopt(zmq.SNDHWM, self._max_unread)
                return _FurtherClient(core, dispatch, self._emits, next(indices), lifeline, output)

            self._door = _Door(self._inbox, make)
            self._door.start()
        return str(self._door.folder.path)

    def close(self) -> None:
        """Send what was emitted, then end all connections."""
        if self._door is not None:
            self._door.close()


class _FurtherClient:
    """A client as the step loop sees it: made in the door's thread, and used in the step loop from ``enter`` on."""

    def __init__(
        self,
        core: EngineCore,
        dispatch: Dispatch,
        emits: Emits,
        index: int,
        lifeline: socket.socket,
        output: "zmq.Socket[bytes]",
    ) -> None:
        self._core = core
        self._dispatch = dispatch
        self._emits = emits
        self._index = index
        self._lifeline = lifeline
        self._output = output
        self._prefix = f"{index}:"
        self._encoder = msgspec.msgpack.Encoder()
        self.decoder: msgspec.msgpack.Decoder[ToEngine] = msgpack_decoder(ToEngine)
        # The engine's names of the choices whose last output has not been sent.
        self._live: set[str] = set()

    def enter(self) -> None:
        """Begin to send this client its messages, the first of which is Ready."""
        self._emits[self._index] = self.emit
        self.emit(Ready(self._core.info))
        logger.info("client %d has attached to the engine", self._index)

    def apply(self, message: ToEngine) -> None:
        """Apply a message of this client. It changes nothing that is not the client's own."""
        match message:
            case _ if self._index not in self._emits:
                pass  # it was dropped meanwhile
            case AddRequest(request):
                self._add(request)
            case Abort(keys):
                self._core.abort([self._prefix + key for key in keys])
            case AbortRequest(request_id, attempt, choice):
                self._core.scheduler.abort_request(self._prefix + request_id, attempt, choice)
            case Prepare(call_id, request):
                self._dispatch(Prepare(call_id, self._own(request)), self.emit)
            case Call(call_id, method) if method not in _READING_CALLS:
                self._refuse(call_id, method)
            case Share(call_id):
                self._refuse(call_id, "share")
            case Call() | UntilFree():
                self._dispatch(message, self.emit)
            case Shutdown():
                self._hang_up()

    def emit(self, message: FromEngine) -> None:
        """Send a message without blocking; drop the client if too many are unread. Does nothing once it has left."""
        if self._index not in self._emits:
            return
        if isinstance(message, StepOutputs):
            for output in message.outputs:
                if output.is_leg_finished:
                    self._live.discard(output.key)
                output.request_id = output.request_id.removeprefix(self._prefix)
        try:
            self._output.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            logger.warning(
                "client %d is dropped: it does not read, and %d messages wait for it",
                self._index,
                self._output.getsockopt(zmq.SNDHWM),
            )
            self._hang_up()

    def leave(self) -> None:
        """Abort the requests of a client that has left."""
        self._hang_up()
        self._core.abort(list(self._live))
        logger.info("client %d has left the engine; %d answers were aborted", self._index, len(self._live))

    def _add(self, request: EngineRequest) -> None:
        own = self._own(request)
        self._live.update(own.keys)
        if request.transfer is None:
            self._core.add_request(own)
        else:
            error = InvalidRequestError("only the client that started the engine hands requests over")
            self._core.scheduler.reject(own, error)

    def _own(self, request: EngineRequest) -> EngineRequest:
        """Return the request under the name that only this client uses; it shares steps fairly with those of the others."""
        return structs.replace(
            request,
            request_id=self._prefix + request.request_id,
            client_index=self._index,
            tenant=self._prefix + request.tenant,
        )

    def _refuse(self, call_id: int, name: str) -> None:
        message = (
            f"only the client that started the engine calls {name}; others call {', '.join(_READING_CALLS)}"
        )
        self.emit(CallResult(call_id, None, ErrorKind.INVALID_REQUEST.value, message))

    def _hang_up(self) -> None:
        """End the connection, which makes the door's thread call for ``leave``. May be called twice."""
        self._emits.pop(self._index, None)
        self._output.close(linger=0)
        with contextlib.suppress(OSError):  # it is closed
            self._lifeline.shutdown(socket.SHUT_RDWR)


class _Door(threading.Thread):
    """Accepts clients, and passes their messages to the step loop. ``close`` is called there, all else in its own thread.

    make: makes a client of its connection and the socket to it. Raises SettingError if the folder's path is too long.
    """

    def __init__(
        self, inbox: Inbox, make: Callable[[socket.socket, "zmq.Socket[bytes]"], _FurtherClient]
    ) -> None:
        super().__init__(name="engine-clients", daemon=True)
        self.folder = RunFolder("shared")
        self._inbox = inbox
        self._make = make
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(str(self.folder.path / DOOR))
        except OSError as error:
            self._listener.close()
            self.folder.close()
            raise SettingError(
                f"the engine's socket cannot be made in {self.folder.path}: {error}; set TMPDIR to another (shorter) folder",
                param="TMPDIR",
            ) from error
        self._listener.setblocking(False)
        self._listener.listen()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._wake, self._closing = socket.socketpair()
        self._lifelines: set[socket.socket] = set()
        self._poller = zmq.Poller()
        # By the descriptor of a connection, or by the ZeroMQ socket.
        self._handlers: dict[Any, Callable[[], None]] = {}

    def run(self) -> None:
        """Wait for clients, their messages and the ends of their connections, until ``close``."""
        self._handle(self._listener.fileno(), self._accept)
        self._poller.register(self._wake.fileno(), zmq.POLLIN)
        while True:
            for source, _ in self._poller.poll():
                if source == self._wake.fileno():
                    return
                # One before in this list may have ended the client of this one.
                if handler := self._handlers.get(source):
                    handler()

    def close(self) -> None:
        """End the thread, send what waits for the clients, and end all connections."""
        self._closing.close()
        self.join()
        self._context.destroy(linger=_FLUSH_MILLISECONDS)
        for connection in (*self._lifelines, self._listener, self._wake):
            connection.close()
        self.folder.close()

    def _handle(self, source: Any, handler: Callable[[], None]) -> None:
        self._handlers[source] = handler
        self._poller.register(source, zmq.POLLIN)

    def _ignore(self, source: Any) -> None:
        self._poller.unregister(source)
        del self._handlers[source]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it has left already
            lifeline, _ = self._listener.accept()
            lifeline.setblocking(False)
            self._lifelines.add(lifeline)
            self._handle(lifeline.fileno(), partial(self._admit, lifeline))

    def _admit(self, lifeline: socket.socket) -> None:
        """Connect to the sockets in the folder that a client names; a line that is so short arrives whole."""
        self._ignore(lifeline.fileno())
        if not (line := _received(lifeline)):
            self._forget(lifeline)
            return
        output = self._context.socket(zmq.PUSH)
        messages = self._context.socket(zmq.PULL)
        try:
            addresses = Addresses.within(Path(line.decode().rstrip("\n")))
            # Before the input: the client takes that one's connection as a sign of both.
            client = self._make(lifeline, output)
            output.connect(addresses.from_engine)
            messages.setsockopt(zmq.RCVHWM, 0)
            messages.connect(addresses.to_engine)
        except (zmq.ZMQError, UnicodeDecodeError) as error:
            logger.warning("a client could not attach to the engine: %s", error)
            output.close()
            messages.close()
            self._forget(lifeline)
            return
        self._handle(messages, partial(self._read, client, messages))
        self._handle(lifeline.fileno(), partial(self._on_end, client, messages, lifeline))
        self._inbox.put(client.enter)

    def _read(self, client: _FurtherClient, messages: "zmq.Socket[bytes]") -> None:
        """Pass on a client's next message. One that cannot be decoded ends the client."""
        message: ToEngine
        try:
            message = client.decoder.decode(messages.recv(zmq.NOBLOCK))
        except zmq.Again:
            return
        except DECODING_ERRORS as error:
            logger.warning("a client of the engine is dropped: its message cannot be read: %s", error)
            message = Shutdown()
        self._inbox.put(partial(client.apply, message))

    def _on_end(self, client: _FurtherClient, messages: "zmq.Socket[bytes]", lifeline: socket.socket) -> None:
        self._ignore(messages)
        messages.close(linger=0)
        self._ignore(lifeline.fileno())
        self._forget(lifeline)
        self._inbox.put(client.leave)

    def _forget(self, lifeline: socket.socket) -> None:
        self._lifelines.discard(lifeline)
        lifeline.close()


def _received(connection: socket.socket) -> bytes:
    """Return what has come; nothing if the connection has ended."""
    with contextlib.suppress(OSError):
        return connection.recv(_MAX_LINE_BYTES)
    return b""
