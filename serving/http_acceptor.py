"""Accepts clients' connections, of HTTP and gRPC, within the limits of a listener and of the process's descriptors.

The limit of descriptors is divided among the listeners of the process.
"""

import asyncio
import errno
import logging
import resource
import socket
import ssl
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from contract.addresses import ALL
from serving.http_connections import EVICTION_AGE_SECONDS, Connection, Connections, HttpLimits, address_of

logger = logging.getLogger(__name__)

_BACKLOG = 4096
_UNIX_MODE = 0o660
# In one round of the event loop: each takes about 0.2 ms, and delays the open connections.
_ACCEPTS_AT_ONCE = 8
_RETRY_SECONDS = 1.0
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
HTTP_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\n"
    b"Content-Type: text/plain; charset=utf-8\r\nContent-Length: 35\r\n\r\n"
    b"too many connections of one address"
)
_TLS_CLOSE_SECONDS = 5.0

_MAX_LIMIT = 2**17
_MIN_RESERVE = 64
_MIN_SHARE = 8
_PER_GRPC_CLIENT = 3
_MAX_INTERNAL = 2**14
_OWN_DESCRIPTORS = Path("/proc/self/fd")


class PlainSocket(socket.socket):
    """A socket whose family and type are numbers: the base class makes enumerations of them, which takes microseconds."""

    __slots__ = ()
    family = socket.SocketType.family  # type: ignore[assignment]
    type = socket.SocketType.type  # type: ignore[assignment]

    def accept(self) -> tuple["PlainSocket", Any]:
        """Return a connection and its peer name, as ``socket.accept`` does without a time-out. Raises OSError."""
        descriptor, name = self._accept()  # type: ignore[attr-defined]
        return PlainSocket(self.family, self.type, self.proto, fileno=descriptor), name


async def listen(host: str, port: int, *, is_shared: bool = False) -> list[socket.socket]:
    """Return listening sockets for every address of ``host``, all on one port. Raises OSError.

    ``ALL`` stands for the addresses of both families, or of the one that this machine has.
    is_shared: other processes of this user may listen there too; the system distributes connections among them.
    """
    found = await asyncio.get_running_loop().getaddrinfo(
        None if host == ALL else host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            bound_port = sockets[0].getsockname()[1] if sockets else port
            if not _has(family, host):
                continue
            opened = PlainSocket(family, kind, protocol)
            sockets.append(opened)
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if is_shared:
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # its connections inherit this
            if family == socket.AF_INET6:
                # The IPv4 addresses have a socket of their own on the same port.
                opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            opened.bind((address[0], bound_port, *address[2:]))
            opened.setblocking(False)
            opened.listen(_BACKLOG)
    except OSError:
        for each in sockets:
            each.close()
        raise
    return sockets


def listen_at_path(path: str) -> socket.socket:
    """Return a listening Unix socket, which the process's user and group may use. Raises OSError.

    A socket that a process has left behind is replaced; one on which another process listens is not.
    """
    opened = PlainSocket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with suppress(FileNotFoundError):
            if stat.S_ISSOCK(Path(path).lstat().st_mode):
                # A socket whose process has ended refuses a connection.
                if opened.connect_ex(path) == 0:
                    raise OSError(errno.EADDRINUSE, "another process listens there")
                Path(path).unlink()
                opened.close()
                opened = PlainSocket(socket.AF_UNIX, socket.SOCK_STREAM)
        opened.bind(path)
        Path(path).chmod(_UNIX_MODE)
        opened.setblocking(False)
        opened.listen(_BACKLOG)
    except OSError:
        opened.close()
        raise
    return opened


def _has(family: socket.AddressFamily, host: str) -> bool:
    """Return False for IPv6 on a machine that has none, where ``host`` stands for all of its addresses."""
    if host != ALL or family != socket.AF_INET6:
        return True
    try:
        with socket.socket(family) as probe:
            probe.bind((ALL, 0))
    except OSError:
        return False
    return True


class Listening(Protocol):
    """A listening socket."""

    def accept(self) -> tuple[socket.socket, Any]:
        """Return a connection and its peer name. Raises OSError."""


class Accepted(Connection, Protocol):
    """The asyncio protocol of an accepted connection."""

    @property
    def is_open(self) -> bool:
        """True from the end of the TLS handshake until the connection is lost."""

    def call_to_abort(self, call: Callable[[], object]) -> None:
        """Set the function that aborts the connection before it is open."""


class HttpAcceptor:
    """Owns the listening sockets. If all connections are busy, new clients wait in the system's backlog.

    make: returns the protocol of one connection. refusal: sent without TLS to a client whose address has too many.
    """

    def __init__(
        self,
        sockets: list[socket.socket],
        make: Callable[[], Accepted],
        book: Connections,
        limits: HttpLimits,
        tls: ssl.SSLContext | None,
        refusal: bytes = HTTP_REFUSAL,
    ) -> None:
        self.sockets = sockets
        self._make = make
        self._book = book
        self._limits = limits
        self._tls = tls
        self._refusal = b"" if tls else refusal
        self._loop = asyncio.get_running_loop()
        self._openings: set[asyncio.Task[None]] = set()
        self._is_paused = True
        self._retry: asyncio.TimerHandle | None = None

    @property
    def port(self) -> int:
        """The port of every socket."""
        return int(self.sockets[0].getsockname()[1])

    def start(self) -> None:
        """Begin to accept."""
        self._resume()

    def stop_listening(self) -> None:
        """Accept the connections that wait already, and none after them; open ones stay. Does nothing the second time."""
        if not self._is_paused:
            for listening in self.sockets:
                self.accept_from(listening, at_most=_BACKLOG)
        self._pause()
        self._book.call_when_room(None)
        for listening in self.sockets:
            listening.close()

    def close(self) -> None:
        """Stop accepting and listening; open connections stay, and those that are being opened end."""
        self.stop_listening()
        for opening in self._openings:
            opening.cancel()

    def _resume(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._is_paused:
            self._is_paused = False
            self._book.call_when_room(None)
            for listening in self.sockets:
                self._loop.add_reader(listening.fileno(), self.accept_from, listening)

    def _pause(self, retry_seconds: float | None = None) -> None:
        """Leave new clients in the backlog until there is room, or until ``retry_seconds`` have passed."""
        if not self._is_paused:
            self._is_paused = True
            self._book.call_when_room(self._resume)
            for listening in self.sockets:
                self._loop.remove_reader(listening.fileno())
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if retry_seconds is not None:
            self._retry = self._loop.call_later(retry_seconds, self._resume)

    def accept_from(self, listening: Listening, at_most: int = _ACCEPTS_AT_ONCE) -> None:
        """Accept the connections that wait at a listening socket; called by the event loop."""
        for _ in range(at_most):
            if not self._book.make_room():
                self._pause(EVICTION_AGE_SECONDS if self._book.num_waiting else None)
                return
            try:
                accepted, name = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # The process or the system is out of descriptors or memory: the client stays in the backlog.
                if error.errno not in _EXHAUSTED:
                    raise
                logger.warning("no connection can be accepted: %s", error.strerror)
                self._pause(_RETRY_SECONDS)
                return
            self._admit(accepted, address_of(name))

    def _admit(self, accepted: socket.socket, address: str) -> None:
        if not self._book.admits(address):
            logger.warning(
                "%s has %d connections, the limit per address; another one is refused",
                *(address, self._limits.max_per_address),
            )
            _refuse(accepted, self._refusal)
            return
        connection = self._make()
        self._book.add(connection, address)
        opening = self._loop.create_task(self._open(accepted, connection, address), name="open a connection")
        self._openings.add(opening)
        connection.call_to_abort(opening.cancel)
        opening.add_done_callback(self._openings.discard)

    async def _open(self, accepted: socket.socket, connection: Accepted, address: str) -> None:
        """Open the connection when it is its address's turn, with a TLS handshake if there is TLS; a failure closes it."""
        handshake = self._limits.header_seconds if self._tls else None
        closing = _TLS_CLOSE_SECONDS if self._tls else None
        penalties = self._book.penalties
        try:
            if penalties.is_due(address):
                await penalties.until_turn(address)
            await self._loop.connect_accepted_socket(
                lambda: cast(asyncio.BaseProtocol, connection),
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=handshake,
                ssl_shutdown_timeout=closing,
            )
        except OSError as error:
            penalties.note(address, penalties.opening_seconds)
            logger.debug("a connection ended before its first request: %s", error)
        finally:
            # Nothing else closes the socket of a connection that was not opened.
            if not connection.is_open:
                self._book.remove(connection)
                accepted.close()


def _refuse(accepted: socket.socket, refusal: bytes) -> None:
    with accepted:
        accepted.setblocking(False)
        try:
            if refusal:
                accepted.send(refusal)
            # Closing alone could drop the answer, if bytes of the client were not read.
            accepted.shutdown(socket.SHUT_WR)
        except OSError:
            pass


@dataclass(frozen=True)
class ConnectionCaps:
    """Limits of the open connections of each listener. internal: those of workers, authenticated or not.

    grpc: a connection of a client has up to three descriptors, since its front connects to gRPC's server.
    """

    http: int
    grpc: int
    internal: int


def raise_descriptor_limit() -> int:
    """Raise the soft limit on open descriptors to the hard one (at most 131,072); return the soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = min(hard, _MAX_LIMIT) if hard != resource.RLIM_INFINITY else _MAX_LIMIT
    if soft == resource.RLIM_INFINITY or soft >= target:
        return _MAX_LIMIT if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    except (OSError, ValueError) as error:
        logger.warning("the limit of %d open descriptors cannot be raised to %d: %s", soft, target, error)
        return soft
    return target


def num_open_descriptors() -> int:
    """Count the open descriptors of this process; 64 if the system does not list them."""
    return sum(1 for _ in _OWN_DESCRIPTORS.iterdir()) if _OWN_DESCRIPTORS.is_dir() else _MIN_RESERVE


def internal_connections(limit: int, num_open: int) -> int:
    """Return the limit of connections on the internal port of a process without public ports."""
    reserve = _reserve(limit)
    return min(_MAX_INTERNAL, max(reserve // 2, limit - num_open - 2 * reserve))


def _reserve(limit: int) -> int:
    return max(_MIN_RESERVE, limit // 8)


def connection_caps(
    max_connections: int, limit: int, num_open: int, num_files: int | None = None
) -> ConnectionCaps:
    """Divide the descriptors that the process does not need itself among its public listeners.

    max_connections: the configured limit of each listener. limit: the process's limit on descriptors. num_open: number of
    open ones. One eighth of the limit (at least 64) is reserved for workers and operators. HTTP gets three quarters of the
    rest, gRPC one quarter. The internal port gets the remainder, and at least half of the reserve. num_files: files that
    batches have open, for which up to a third of the rest is reserved; if it is given, each HTTP client may also open one.
    """
    reserve = _reserve(limit)
    free = limit - num_open - reserve
    # Batches must not take what clients need.
    free -= min(num_files or 0, free // 3)
    per_client = 1 if num_files is None else 2
    http = max(_MIN_SHARE, min(max_connections, free * 3 // 4 // per_client))
    public = max(_MIN_SHARE, min(max_connections, free // 4 // _PER_GRPC_CLIENT))
    left = free - per_client * http - _PER_GRPC_CLIENT * public
    caps = ConnectionCaps(http, public, min(_MAX_INTERNAL, max(reserve // 2, left)))
    if caps.http < max_connections:
        logger.warning(
            "max_connections is %d; the limit of %d open descriptors allows %d for HTTP and %d for gRPC: "
            "raise it (ulimit -n, LimitNOFILE)",
            *(max_connections, limit, caps.http, caps.grpc),
        )
    return caps
