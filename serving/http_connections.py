"""Tracks the open connections of clients, of HTTP and gRPC, and chooses one to evict when a listener is full.

The kernel counts what a connection's peer has acknowledged, and what waits to be read.
"""

import asyncio
import fcntl
import logging
import socket
import struct
import termios
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from serving.penalties import Penalties

logger = logging.getLogger(__name__)

EVICTION_AGE_SECONDS = 0.25
"""Minimum time for which a connection waits before it is evicted, so that its client has time to send."""
# End of ``tcpi_bytes_acked``, eight bytes, in Linux's ``struct tcp_info``.
_ACKED_END = 128


@dataclass(frozen=True, kw_only=True)
class HttpLimits:
    """The limits of one listener for clients.

    header_seconds: time from a connection's start, or a request's first byte, to the end of its headers (and of the TLS
    handshake). idle_seconds: time between two requests. stall_seconds: time in which no byte of an answer is acknowledged.
    max_header_bytes: size of one request's headers.
    """

    max_connections: int = 64
    max_per_address: int = 64
    header_seconds: float = 10.0
    idle_seconds: float = 75.0
    stall_seconds: float = 60.0
    max_header_bytes: int = 2**16


class Connection(Protocol):
    """One accepted connection."""

    @property
    def is_waiting(self) -> bool:
        """True if it waits for bytes of its client: it is idle, or its request is not complete."""

    def abort(self) -> None:
        """Close at once and drop unsent bytes."""


class Answering:
    """Owns the set of connections whose request is being answered."""

    def __init__(self) -> None:
        self._connections: set[Connection] = set()
        self.is_idle = asyncio.Event()
        self.is_idle.set()
        """Set while no request is being answered."""

    def __len__(self) -> int:
        return len(self._connections)

    def begin(self, connection: Connection) -> None:
        """Record that a request is being answered."""
        self._connections.add(connection)
        self.is_idle.clear()

    def end(self, connection: Connection) -> None:
        """Record that the answer is written. Does nothing if none was begun."""
        self._connections.discard(connection)
        if not self._connections:
            self.is_idle.set()


class Connections:
    """Owns the list of one listener's connections, by client address.

    A new connection evicts one without a complete request, so that silent clients cannot block others: the one that has
    waited longest, of the address with most connections. clock: returns seconds. min_age_seconds: time for which a
    connection is not evicted. penalties: of addresses that waste time; the connections' own if None.
    """

    def __init__(
        self,
        max_connections: int,
        max_per_address: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        min_age_seconds: float = EVICTION_AGE_SECONDS,
        penalties: Penalties | None = None,
    ) -> None:
        self.penalties = penalties or Penalties(clock)
        self._max = max_connections
        self._max_per_address = max_per_address
        self._min_age = min_age_seconds
        self._clock = clock
        self._addresses: dict[Connection, str] = {}
        self._waiting: dict[str, dict[Connection, float]] = {}
        self._num_by_address: dict[str, int] = {}
        self.answering = Answering()
        self._on_room: Callable[[], None] | None = None

    @property
    def num_waiting(self) -> int:
        """The number of connections that may be evicted."""
        return sum(map(len, self._waiting.values()))

    def __len__(self) -> int:
        return len(self._addresses)

    def call_when_room(self, call: Callable[[], None] | None) -> None:
        """Set the function to call when a connection has ended or can be evicted, if there is one."""
        self._on_room = call

    def make_room(self) -> bool:
        """Ensure room for another connection, by evicting a waiting one if necessary; False if all are busy."""
        if len(self._addresses) < self._max:
            return True
        largest_first = sorted(self._waiting, key=lambda one: -self._num_by_address[one])
        return any(map(self._evict, largest_first))

    def admits(self, address: str) -> bool:
        """Ensure room for another connection of this address; False if all that it may have are busy."""
        return self._num_by_address.get(address, 0) < self._max_per_address or self._evict(address)

    def add(self, connection: Connection, address: str) -> None:
        """Add a new connection, in the waiting state."""
        self._addresses[connection] = address
        self._num_by_address[address] = self._num_by_address.get(address, 0) + 1
        self.wait(connection)

    def wait(self, connection: Connection) -> None:
        """Record that the connection waits for its client from now on."""
        if (address := self._addresses.get(connection)) is not None:
            waiting = self._waiting.setdefault(address, {})
            waiting.pop(connection, None)
            waiting[connection] = self._clock()
            if self._on_room:
                self._on_room()

    def work(self, connection: Connection) -> None:
        """Record that the connection has a complete request."""
        if (address := self._addresses.get(connection)) is not None:
            self._forget_waiting(connection, address)

    def remove(self, connection: Connection) -> None:
        """Remove a connection; do nothing if it is not listed."""
        self.answering.end(connection)
        if (address := self._addresses.pop(connection, None)) is None:
            return
        self._forget_waiting(connection, address)
        self._num_by_address[address] -= 1
        if not self._num_by_address[address]:
            del self._num_by_address[address]
        if self._on_room:
            self._on_room()

    def note_useless(self, name: tuple[object, ...] | str | None) -> None:
        """Record that a connection has sent nothing of use. name: of its peer's socket; empty for a Unix socket."""
        if name:
            self.penalties.note(address_of(name), self.penalties.opening_seconds)

    def abort_all(self) -> None:
        """Close every connection at once."""
        for connection in list(self._addresses):
            connection.abort()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the three indexes agree."""
        counted: dict[str, int] = {}
        for address in self._addresses.values():
            counted[address] = counted.get(address, 0) + 1
        assert counted == self._num_by_address
        for address, waiting in self._waiting.items():
            assert waiting, address
            assert all(self._addresses[connection] == address for connection in waiting)

    def _evict(self, address: str) -> bool:
        now = self._clock()
        for connection, since in list(self._waiting.get(address, {}).items()):
            # The oldest comes first: if it is too young, all are.
            if now - since < self._min_age:
                return False
            # A connection whose bytes have arrived but were not read does not wait for its client any more.
            if connection.is_waiting:
                logger.warning("too many connections: closing one of %s that waits for its client", address)
                self.remove(connection)
                connection.abort()
                return True
            self._forget_waiting(connection, address)
        return False

    def _forget_waiting(self, connection: Connection, address: str) -> None:
        waiting = self._waiting.get(address, {})
        waiting.pop(connection, None)
        if not waiting:
            self._waiting.pop(address, None)


def address_of(name: tuple[object, ...] | str) -> str:
    """Return the address under which a peer is counted: an IPv4 address, or the /64 network of an IPv6 one."""
    host = str(name[0]) if isinstance(name, tuple) and name else ""
    if ":" not in host:
        return host
    packed = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    if packed[:12] == b"\0" * 10 + b"\xff\xff":
        return socket.inet_ntop(socket.AF_INET, packed[12:])
    # One client can have a whole /64 network of addresses.
    return socket.inet_ntop(socket.AF_INET6, packed[:8] + bytes(8)) + "/64"


def num_acknowledged(own: socket.socket | None) -> int:
    """Return the number of bytes that the peer's system acknowledged; 0 if the system does not count them."""
    option = getattr(socket, "TCP_INFO", None)
    if own is None or option is None:
        return 0
    try:
        info = own.getsockopt(socket.IPPROTO_TCP, option, _ACKED_END)
    except OSError:
        return 0
    return struct.unpack_from("Q", info, _ACKED_END - 8)[0] if len(info) == _ACKED_END else 0


def has_unread_bytes(own: socket.socket | None) -> bool:
    """Return True if bytes of the peer have arrived and were not read."""
    if own is None:
        return False
    try:
        (count,) = struct.unpack("i", fcntl.ioctl(own.fileno(), termios.FIONREAD, bytes(4)))
    except OSError:
        return False
    return bool(count)
