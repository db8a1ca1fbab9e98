"""The ``tcp`` transport's sender: a data server that lets peers read lent blocks, one thread per connection."""

import logging
import selectors
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

from contract.errors import TransferError
from engine.connector import KVMemory
from kv_transfer.framing import format_address, listen_on, read_frame, send_all, write_frame
from kv_transfer.leases import LeaseBook
from kv_transfer.transport import LeaseName, ReadRequest, StaleLeaseError
from kv_transfer.transports.context import TransportContext
from kv_transfer.transports.tcp_wire import MAX_DATA_FRAME_BYTES, DataHello, DataReply, DataStatus

logger = logging.getLogger(__name__)


class _Connection:
    """One peer's data connection. ``reading`` names the lease that is being read, guarded by the server's lock."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.token = ""
        self.reading: LeaseName | None = None


class TcpSender:
    """Owns the data port, its threads and the leases that are served there."""

    def __init__(self, context: TransportContext) -> None:
        self._context = context
        self._book = LeaseBook(context.on_idle)
        self._lock = threading.Lock()
        self._connections: dict[_Connection, threading.Thread] = {}
        self._is_closed = False
        self._listener = listen_on(context.host, context.data_port)
        port = self._listener.getsockname()[1]
        self.address = format_address(context.advertise_host or context.host, port)
        self._wake_in, self._wake_out = socket.socketpair()
        context.sessions.listen(self._end_session)
        self._thread = threading.Thread(target=self._accept, name="kv-data-accept", daemon=True)
        self._thread.start()

    def publish(self, name: LeaseName, memory: KVMemory, block_ids: Sequence[int]) -> None:
        """Append blocks to the lease."""
        self._book.extend(name, memory, block_ids)

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
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake_in, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if self._wake_in in ready:
                    return
                with suppress(OSError):  # the dialer gave up already, or no descriptor is free: others go on
                    self._start_connection(self._listener.accept()[0])

    def _start_connection(self, sock: socket.socket) -> None:
        connection = _Connection(sock)
        thread = threading.Thread(target=self._serve, args=(connection,), name="kv-data-serve", daemon=True)
        with self._lock:
            if self._is_closed:
                sock.close()
                return
            self._connections[connection] = thread
            thread.start()

    def _serve(self, connection: _Connection) -> None:
        sock = connection.sock
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(self._context.read_timeout_seconds)
            if self._greet(connection):
                while True:
                    sock.settimeout(None)
                    request = read_frame(sock, ReadRequest, MAX_DATA_FRAME_BYTES)
                    sock.settimeout(self._context.read_timeout_seconds)
                    self._answer(connection, request)
        except (OSError, TransferError) as error:
            logger.debug("a data connection ended: %s", error)
        except Exception:  # the boundary of the data protocol: the peer sees a short read
            logger.exception("serving a data connection failed")
        finally:
            with self._lock:
                del self._connections[connection]
                sock.close()

    def _greet(self, connection: _Connection) -> bool:
        token = read_frame(connection.sock, DataHello, MAX_DATA_FRAME_BYTES).token
        with self._lock:
            connection.token = token
        is_known = token in self._context.sessions
        status = DataStatus.OK if is_known else DataStatus.DENIED
        _reply(connection.sock, status, "" if is_known else "no control link stands behind this connection")
        return is_known

    def _answer(self, connection: _Connection, request: ReadRequest) -> None:
        """Serve one piece: the bytes only under a valid lease, and the verdict after the last of them."""
        status, message = DataStatus.OK, ""
        try:
            with self._book.reading(request) as views:
                with self._lock:
                    connection.reading = request.name
                self._book.check(request.name)
                _reply(connection.sock, DataStatus.OK)
                send_all(connection.sock, views)
            self._book.check(request.name)
        except StaleLeaseError as error:
            status, message = DataStatus.STALE, error.message
        finally:
            # Before the verdict: the peer may release the lease as soon as it has read it, and goes on to use the
            # connection.
            with self._lock:
                connection.reading = None
        _reply(connection.sock, status, message)

    def _end_session(self, token: str) -> None:
        with self._lock:
            for connection in self._connections:
                if connection.token == token:
                    _shut_down(connection.sock)


def _reply(sock: socket.socket, status: DataStatus, message: str = "") -> None:
    write_frame(sock, DataReply(status, message), MAX_DATA_FRAME_BYTES)


def _shut_down(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        logger.debug("a data connection was closed by its peer already")
