"""A data port: peers dial it, prove the session of their control link, and are served by one thread per connection.

A connection has a thread from when it has proved a session; until then one thread reads all of them.
"""

import logging
import math
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

from contract.errors import PeerUnreachableError, TransferError, UnauthenticatedError
from kv_transfer.links.framing import format_address, parse_address, read_frame, write_frame
from kv_transfer.links.listening import Listener
from kv_transfer.protocol.reads import Source
from kv_transfer.transports.context import TransportContext
from kv_transfer.transports.data_greeting import UNKNOWN, Lending, Reading
from kv_transfer.transports.data_lobby import Lobby, UnauthenticatedConnection
from kv_transfer.transports.data_stream import DataStream
from kv_transfer.transports.data_wire import (
    MAX_DATA_FRAME_BYTES,
    DataChallenge,
    DataReply,
    DataStatus,
    reply_frame,
)

logger = logging.getLogger(__name__)
_MAX_WAIT_SECONDS = 3600.0
_MAX_NAME_BYTES = 16
"""Linux's TCP_CA_NAME_MAX."""


class Connection:
    """One connection of a peer that has proved a session. token: the session's."""

    def __init__(self, sock: socket.socket, token: str) -> None:
        self.sock, self.stream = sock, DataStream(sock)
        self.token = token
        self._lock = threading.Lock()
        self._is_kept = self._is_over = False

    def end(self) -> None:
        """Shut the connection down, now or when it is not kept open any more."""
        with self._lock:
            self._is_over = True
            if not self._is_kept:
                shut_down(self.sock)

    @contextmanager
    def kept_open(self) -> Iterator[None]:
        """Within, the end of the session leaves the connection open. Raises TransferError behind it, if it is over."""
        with self._lock:
            self._is_kept = True
        try:
            yield
        finally:
            with self._lock:
                self._is_kept = False
                is_over = self._is_over
        if is_over:
            raise TransferError("the session is over")


class DataPort:
    """Owns the port, its threads and its connections; each ends with the session that it was opened for.

    serve: speaks with a peer whose token is good, over a blocking socket; called in the connection's thread. It raises
    OSError or TransferError at the end. A peer that takes no byte for ``read_timeout_seconds`` ends its connection.
    """

    def __init__(
        self, context: TransportContext, name: str, serve: Callable[[Connection], None], *, transport: str
    ) -> None:
        self._transport = transport
        self._sessions = context.sessions
        self._patience_seconds = context.read_timeout_seconds
        self._name = name
        self._talk = serve
        self._on_failed = context.on_thread_failed
        self._lock = threading.Lock()
        self._connections: dict[Connection, threading.Thread] = {}
        self._is_closed = False
        self._listener = Listener(context.host, context.data_port)
        self.address = format_address(context.advertise_host or context.host, self._listener.port)
        self._wake_in, self._wake_out = socket.socketpair()
        context.sessions.listen(self._end_session)
        self._thread = threading.Thread(target=self._run, name=f"{name}-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Shut every connection down and join every thread. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            threads = list(self._connections.values())
            for connection in self._connections:
                shut_down(connection.sock)
        self._wake_out.send(b"\0")
        for thread in (self._thread, *threads):
            thread.join()
        for sock in (self._listener, self._wake_in, self._wake_out):
            sock.close()

    def _run(self) -> None:
        try:
            self._accept()
        except Exception as error:  # the boundary of the thread: without it no connection is accepted
            logger.exception("the data port has failed")
            self._on_failed(self._thread.name, error)

    def _accept(self) -> None:
        with (
            selectors.DefaultSelector() as selector,
            closing(Lobby(selector, self._patience_seconds)) as lobby,
        ):
            selector.register(self._wake_in, selectors.EVENT_READ)
            while True:
                self._listener.watch(selector)
                due = min(lobby.dismiss_late(time.monotonic()), self._listener.resume_at)
                ready = [key for key, _ in selector.select(_seconds_until(due))]
                if any(key.fileobj is self._wake_in for key in ready):
                    return
                for unauthenticated in [key.data for key in ready if key.data is not None]:
                    self._greet(lobby, unauthenticated)
                if any(key.data is None for key in ready):
                    for sock in self._listener.accept_some():
                        lobby.let_in(sock, Lending(self._sessions, self._transport))

    def _greet(self, lobby: Lobby, unauthenticated: UnauthenticatedConnection) -> None:
        try:
            token = unauthenticated.receive()
        except (OSError, TransferError, UnauthenticatedError) as error:
            logger.debug("%s: an unauthenticated connection ended: %s", self._name, error)
            lobby.dismiss(unauthenticated)
            return
        if token is not None:
            self._receive(Connection(lobby.release(unauthenticated), token))

    def _receive(self, connection: Connection) -> None:
        thread = threading.Thread(
            target=self._serve, args=(connection,), name=f"{self._name}-serve", daemon=True
        )
        with self._lock:
            if self._is_closed:
                connection.sock.close()
                return
            self._connections[connection] = thread
            try:
                thread.start()  # which may end at once: it waits for the lock before it forgets the connection
            except RuntimeError as error:
                del self._connections[connection]
                connection.sock.close()
                self._listener.pause(f"no thread can be had: {error}")

    def _serve(self, connection: Connection) -> None:
        try:
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            leave_unpaced(connection.sock)
            connection.stream.wait_at_most(0, self._patience_seconds)  # the next word may be long in coming
            if self._confirm(connection):
                self._talk(connection)
        except (OSError, TransferError) as error:
            logger.debug("%s: a connection ended: %s", self._name, error)
        except Exception:  # the boundary of the data protocol: the peer sees its connection close
            logger.exception("%s: serving a connection failed", self._name)
        finally:
            with self._lock:
                del self._connections[connection]
                connection.sock.close()

    def _confirm(self, connection: Connection) -> bool:
        """Tell a peer whether its session is still open: one that ends from here on finds the connection."""
        is_known = connection.token in self._sessions
        status, message = (DataStatus.OK, "") if is_known else (DataStatus.DENIED, UNKNOWN)
        connection.stream.send(reply_frame(status, message))
        return is_known

    def _end_session(self, token: str) -> None:
        with self._lock:
            for connection in self._connections:
                if connection.token == token:
                    connection.end()


def unconnected(source: Source, timeout_seconds: float) -> socket.socket:
    """A socket for ``dial``; nothing that it does waits longer."""
    family = socket.AF_INET6 if ":" in parse_address(source.address)[0] else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.settimeout(timeout_seconds)
    return sock


def leave_unpaced(sock: socket.socket) -> None:
    """Within one machine, send by Reno where the system's choice is BBR; else leave it.

    BBR sends no faster than the bandwidth that it has estimated, and a machine has none to itself: a third slower.
    """
    if sys.platform == "linux" and sock.getsockname()[0] == sock.getpeername()[0]:
        with suppress(OSError):  # a system without Reno, or that does not allow it
            chosen = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _MAX_NAME_BYTES)
            if chosen.startswith(b"bbr"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def dial(sock: socket.socket, source: Source) -> None:
    """Connect to a peer's data port, and prove the session to each other. Raises PeerUnreachableError (refused), OSError."""
    try:
        sock.connect(parse_address(source.address))
    except UnicodeError as error:  # no host can be called so
        raise PeerUnreachableError(f"worker {source.worker_id} cannot be dialed: {error}") from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    reading = Reading(source)
    write_frame(sock, reading.hello, MAX_DATA_FRAME_BYTES)
    challenge = read_frame(sock, DataChallenge, MAX_DATA_FRAME_BYTES)
    write_frame(sock, reading.prove(challenge), MAX_DATA_FRAME_BYTES)
    reply = read_frame(sock, DataReply, MAX_DATA_FRAME_BYTES)
    if reply.status is not DataStatus.OK:
        raise PeerUnreachableError(f"worker {source.worker_id} refused a data connection: {reply.message}")


def shut_down(sock: socket.socket) -> None:
    """End what waits for a socket, in whatever thread."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        logger.debug("a connection was closed by its peer already")


def _seconds_until(due: float) -> float | None:
    return None if due == math.inf else max(0.0, min(due - time.monotonic(), _MAX_WAIT_SECONDS))
