"""The ``tcp`` transport's sender: a data server that lets peers read lent blocks, one thread per connection."""

import logging
import math
import selectors
import socket
import threading
import time
from collections.abc import Sequence

from contract.errors import TransferError
from engine.connector import KVMemory
from kv_transfer.framing import format_address
from kv_transfer.leases import LeaseBook
from kv_transfer.listening import Listener
from kv_transfer.transport import LeaseName, ReadRequest, StaleLeaseError
from kv_transfer.transports.context import TransportContext
from kv_transfer.transports.tcp_stream import DataStream
from kv_transfer.transports.tcp_wire import DataHello, DataReply, DataStatus

logger = logging.getLogger(__name__)
_MAX_STRANGERS = 64
"""Connections that have not said who they are; one more costs the oldest of them its place."""
_MAX_WAIT_SECONDS = 3600.0
_GO_AHEAD = DataReply(DataStatus.OK).padded()


class _Connection:
    """One peer's data connection. ``reading`` names the lease that is being read, guarded by the server's lock.

    token: empty until the peer has said it; up to ``greet_by`` (monotonic) it has time for that.
    """

    def __init__(self, sock: socket.socket, greet_by: float) -> None:
        self.sock, self.stream = sock, DataStream(sock)
        self.greet_by = greet_by
        self.token = ""
        self.reading: LeaseName | None = None


class TcpSender:
    """Owns the data port, its threads and the leases that are served there."""

    def __init__(self, context: TransportContext, book: LeaseBook | None = None) -> None:
        """Open the port. ``book`` replaces the LeaseBook that calls ``context.on_idle`` (tests)."""
        self._context = context
        self._book = book or LeaseBook(context.on_idle)
        self._lock = threading.Lock()
        self._connections: dict[_Connection, threading.Thread] = {}
        self._is_closed = False
        self._listener = Listener(context.host, context.data_port)
        self.address = format_address(context.advertise_host or context.host, self._listener.port)
        self._wake_in, self._wake_out = socket.socketpair()
        context.sessions.listen(self._end_session)
        self._thread = threading.Thread(target=self._accept, name="kv-data-accept", daemon=True)
        self._thread.start()

    def start(self, memory: KVMemory) -> None:
        """Lend from this pool."""
        self._memory = memory

    def publish(self, name: LeaseName, block_ids: Sequence[int]) -> None:
        """Append blocks to the lease."""
        self._book.extend(name, self._memory, block_ids)

    def release(self, name: LeaseName) -> None:
        """End the lease; a connection that is in the middle of reading it is shut down."""
        self._book.revoke(name)
        with self._lock:
            for connection in self._connections:
                if connection.reading == name:
                    _shut_down(connection.sock)

    def close(self) -> None:
        """Shut every connection down and join every thread."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            threads = list(self._connections.values())
            for connection in self._connections:
                _shut_down(connection.sock)
        self._wake_out.send(b"\0")
        for thread in (self._thread, *threads):
            thread.join()
        for sock in (self._listener, self._wake_in, self._wake_out):
            sock.close()

    def _accept(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_in, selectors.EVENT_READ)
            while True:
                self._listener.watch(selector)
                ready = [key.fileobj for key, _ in selector.select(self._end_strangers(time.monotonic()))]
                if self._wake_in in ready:
                    return
                if ready and (sock := self._listener.accept()) is not None:
                    self._start_connection(sock)

    def _end_strangers(self, now: float) -> float | None:
        """Shut connections down that did not say who they are in time; returns the seconds to the next look."""
        with self._lock:
            strangers = self._strangers()
            overdue = [stranger for stranger in strangers if stranger.greet_by <= now]
            for stranger in overdue:
                _dismiss(stranger)
        due = min((stranger.greet_by for stranger in strangers), default=math.inf)  # inf for the dismissed
        due = min(due, self._listener.resume_at)
        return None if due == math.inf else max(0.0, min(due - now, _MAX_WAIT_SECONDS))

    def _strangers(self) -> list[_Connection]:
        """Who has said nothing yet and may still do so."""
        return [one for one in self._connections if not one.token and one.greet_by < math.inf]

    def _start_connection(self, sock: socket.socket) -> None:
        connection = _Connection(sock, time.monotonic() + self._context.read_timeout_seconds)
        thread = threading.Thread(target=self._serve, args=(connection,), name="kv-data-serve", daemon=True)
        with self._lock:
            strangers = self._strangers()
            if len(strangers) >= _MAX_STRANGERS:
                _dismiss(min(strangers, key=lambda stranger: stranger.greet_by))
            if self._is_closed:
                sock.close()
                return
            try:
                thread.start()  # it waits for the lock before it forgets the connection
            except RuntimeError as error:
                sock.close()
                self._listener.pause(f"no thread can be had: {error}")
                return
            self._connections[connection] = thread

    def _serve(self, connection: _Connection) -> None:
        sock, patience = connection.sock, self._context.read_timeout_seconds
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.stream.wait_at_most(patience, patience)
            if self._greet(connection):
                connection.stream.wait_at_most(0, patience)  # the next request may be long in coming
                while True:
                    self._answer(connection, connection.stream.hear(ReadRequest))
        except (OSError, TransferError) as error:
            logger.debug("a data connection ended: %s", error)
        except Exception:  # the boundary of the data protocol: the peer sees a short read
            logger.exception("serving a data connection failed")
        finally:
            with self._lock:
                del self._connections[connection]
                sock.close()

    def _greet(self, connection: _Connection) -> bool:
        token = connection.stream.hear(DataHello).token
        with self._lock:
            connection.token = token
        is_known = token in self._context.sessions
        status = DataStatus.OK if is_known else DataStatus.DENIED
        message = "" if is_known else "no control link stands behind this connection"
        connection.stream.say(DataReply(status, message).padded())
        return is_known

    def _answer(self, connection: _Connection, request: ReadRequest) -> None:
        """Serve one piece: the bytes only under a valid lease, and the verdict after the last of them."""
        status, message = DataStatus.OK, ""
        try:
            with self._book.reading(request) as views:
                with self._lock:
                    connection.reading = request.name
                self._book.check(request.name)
                connection.stream.say(_GO_AHEAD, views)
            self._book.check(request.name)
        except StaleLeaseError as error:
            status, message = DataStatus.STALE, error.message
        finally:
            # Before the verdict: the peer may release the lease as soon as it has read it, and goes on to use the
            # connection.
            with self._lock:
                connection.reading = None
        connection.stream.say(DataReply(status, message).padded())

    def _end_session(self, token: str) -> None:
        with self._lock:
            for connection in self._connections:
                if connection.token == token:
                    _shut_down(connection.sock)


def _dismiss(stranger: _Connection) -> None:
    stranger.greet_by = math.inf
    _shut_down(stranger.sock)


def _shut_down(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        logger.debug("a data connection was closed by its peer already")
