"""A port that peers read from: they prove the session of their control link, and get a thread per connection.

Until a connection has proved a session it has no thread: one thread reads all of those.
"""

import logging
import math
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress

from contract.addresses import join_address
from contract.errors import TransferError, UnauthenticatedError
from kv_transfer.links.listening import Listener, listen_on
from kv_transfer.transports.data_handshake import (
    UNKNOWN_SESSION,
    DataStatus,
    PendingHandshakes,
    UnauthenticatedConnection,
    reply_frame,
)
from kv_transfer.transports.leases import Sessions
from kv_transfer.transports.transport import TransportContext

logger = logging.getLogger(__name__)
_MAX_WAIT_SECONDS = 3600.0
# Linux's TCP_CA_NAME_MAX.
_MAX_NAME_BYTES = 16
_TIMEVAL = struct.Struct("@ll")


def shutdown(sock: socket.socket, half: int = socket.SHUT_RDWR) -> None:
    """Shut a socket down, which ends what waits for it in any thread."""
    with suppress(OSError):  # the peer may have closed it already
        sock.shutdown(half)


def limit_waits(sock: socket.socket, receive_seconds: float, send_seconds: float) -> None:
    """Let the kernel bound every wait for the peer; 0 waits for ever. A wait that is too long raises BlockingIOError."""
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(receive_seconds))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(send_seconds))


def _timeval(seconds: float) -> bytes:
    """Pack a timeout, rounded up: 0 means for ever."""
    return _TIMEVAL.pack(*divmod(math.ceil(seconds * 1e6), 1_000_000))


def leave_unpaced(sock: socket.socket) -> None:
    """Use Reno within one machine where the system's choice is BBR; else change nothing.

    BBR sends no faster than the bandwidth that it has estimated, which on a busy machine is a third too low.
    """
    if sys.platform == "linux" and sock.getsockname()[0] == sock.getpeername()[0]:
        with suppress(OSError):  # a system without Reno, or that does not allow it
            chosen = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _MAX_NAME_BYTES)
            if chosen.startswith(b"bbr"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


class Connection:
    """A connection of a peer that has proved a session. token: the session's."""

    def __init__(self, sock: socket.socket, token: str) -> None:
        self.sock = sock
        self.token = token
        self._lock = threading.Lock()
        self._receives_on = False
        self._is_over = False

    def end(self) -> None:
        """End the connection because its session is over; within ``receiving_on``, end its sending half only."""
        with self._lock:
            self._is_over = True
            shutdown(self.sock, socket.SHUT_WR if self._receives_on else socket.SHUT_RDWR)

    @contextmanager
    def receiving_on(self) -> Iterator[None]:
        """Keep receiving within, also after the end of the session. Raises TransferError at the exit if it is over."""
        with self._lock:
            self._receives_on = True
        try:
            yield
        finally:
            with self._lock:
                self._receives_on = False
                is_over = self._is_over
        if is_over:
            raise TransferError("the session is over")


class _ServedConnections:
    """Owns the authenticated connections of a port and their threads; each ends with its session."""

    def __init__(self, name: str, sessions: Sessions, serve: Callable[[Connection], None]) -> None:
        self._name = name
        self._serve = serve
        self._lock = threading.Lock()
        self._threads: dict[Connection, threading.Thread] = {}
        sessions.listen(self._end_session)

    def start(self, connection: Connection) -> None:
        """Serve a connection. Raises RuntimeError, with the connection closed, if no thread can be started."""
        thread = threading.Thread(
            target=self._run, args=(connection,), name=f"{self._name}-serve", daemon=True
        )
        with self._lock:
            self._threads[connection] = thread
            try:
                thread.start()  # it may end at once: it needs the lock to remove the connection
            except RuntimeError:
                del self._threads[connection]
                connection.sock.close()
                raise

    def close(self) -> None:
        """End every connection and join its thread; called when no more are started."""
        with self._lock:
            threads = list(self._threads.values())
            for connection in self._threads:
                shutdown(connection.sock)
        for thread in threads:
            thread.join()

    def _run(self, connection: Connection) -> None:
        try:
            self._serve(connection)
        except (OSError, TransferError) as error:
            logger.debug("%s: a connection ended: %s", self._name, error)
        except Exception:  # the boundary of the data protocol: the peer sees its connection close
            logger.exception("%s: serving a connection failed", self._name)
        finally:
            with self._lock:
                # Within the lock: no other thread may shut down a descriptor that is in use again.
                del self._threads[connection]
                connection.sock.close()

    def _end_session(self, token: str) -> None:
        with self._lock:
            for connection in self._threads:
                if connection.token == token:
                    connection.end()


class DataPort:
    """Owns a listener and the thread that accepts from it, and serves the connections to it.

    serve: serves a peer that has proved its session, over a blocking socket, in the connection's thread; it raises
    OSError or TransferError at the end. A peer that takes no byte for ``read_timeout_seconds`` ends its connection.
    listener: replaces the TCP port; owned, even after an error. Then no DataReply is sent, since the transport's first
    message replaces it.
    """

    def __init__(
        self,
        context: TransportContext,
        name: str,
        serve: Callable[[Connection], None],
        *,
        transport: str,
        listener: socket.socket | None = None,
    ) -> None:
        settings = context.settings
        self._context = context
        self._transport = transport
        self._sends_reply = listener is None
        self._serve = serve
        self._listener = Listener(listener or listen_on(settings.host, settings.data_port))
        self.address = join_address(settings.advertise_host or settings.host, self._listener.port)
        self._served = _ServedConnections(name, context.sessions, self._serve_peer)
        self._thread = threading.Thread(target=self._run, name=f"{name}-accept", daemon=True)
        with ExitStack() as undo:
            undo.callback(self._listener.close)
            self._wake_in, self._wake_out = socket.socketpair()
            undo.callback(self._wake_in.close)
            undo.callback(self._wake_out.close)
            self._thread.start()
            undo.pop_all()

    def close(self) -> None:
        """Shut every connection down and join every thread. Idempotent."""
        self._wake_out.close()  # which makes the other end readable
        self._thread.join()
        self._served.close()
        self._listener.close()
        self._wake_in.close()

    def _run(self) -> None:
        try:
            self._accept()
        except Exception as error:  # the boundary of the thread: without it no connection is accepted
            logger.exception("the data port has failed")
            self._context.on_thread_failed(self._thread.name, error)

    def _accept(self) -> None:
        with (
            selectors.DefaultSelector() as selector,
            closing(PendingHandshakes(selector, self._context, self._transport)) as pending,
        ):
            selector.register(self._wake_in, selectors.EVENT_READ)
            while True:
                self._listener.watch(selector)
                due = min(pending.drop_late(time.monotonic()), self._listener.resume_at)
                seconds = min(max(0.0, due - time.monotonic()), _MAX_WAIT_SECONDS)
                ready = [key for key, _ in selector.select(seconds)]
                if any(key.fileobj is self._wake_in for key in ready):
                    return
                for connection in [key.data for key in ready if key.data is not None]:
                    self._receive(pending, connection)
                if any(key.data is None for key in ready):
                    for sock in self._listener.accept_some():
                        pending.add(sock)

    def _receive(self, pending: PendingHandshakes, connection: UnauthenticatedConnection) -> None:
        try:
            token = connection.receive()
        except (OSError, TransferError, UnauthenticatedError) as error:
            logger.debug("%s: an unauthenticated connection ended: %s", self._thread.name, error)
            pending.drop(connection)
            return
        if token is None:
            return
        try:
            self._served.start(Connection(pending.release(connection), token))
        except RuntimeError as error:
            self._listener.pause(f"no thread can be started: {error}")

    def _serve_peer(self, connection: Connection) -> None:
        sock = connection.sock
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            leave_unpaced(sock)
        send_seconds = self._context.settings.read_timeout_seconds
        limit_waits(sock, 0, send_seconds)  # the next request may take any time
        # A session that ends from here on finds the connection; one that has ended already is refused.
        is_known = connection.token in self._context.sessions
        if self._sends_reply:
            refused = reply_frame(DataStatus.DENIED, UNKNOWN_SESSION)
            sock.sendall(reply_frame(DataStatus.OK) if is_known else refused)
        if is_known:
            self._serve(connection)
