"""Which HTTP connections are open, and which of them has to go when there is no room for one more."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

logger = logging.getLogger(__name__)

EVICTION_AGE_SECONDS = 0.25
"""A connection is not evicted before it has waited as long: its client has not had the time to send."""


@dataclass(frozen=True, kw_only=True)
class HttpLimits:
    """What one HTTP listener lets its clients hold.

    header_seconds: from a connection's start, or a request's first byte, to the end of its headers (and of the TLS
    handshake). idle_seconds: between two requests. stall_seconds: without a byte of an answer being acknowledged.
    max_header_bytes: of one request.
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
        """Whether it waits for bytes of its client: it is idle, or its request is not complete."""

    def abort(self) -> None:
        """Close it now and drop what has not been sent."""


class Connections:
    """Owns the book of one listener's connections, by the address of their client.

    A connection without a complete request gives way to a new one, so that silent clients cannot keep others out: the
    one that has waited longest, of the address that holds the most. clock: seconds.
    """

    def __init__(
        self, max_connections: int, max_per_address: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max = max_connections
        self._max_per_address = max_per_address
        self._clock = clock
        self._addresses: dict[Connection, str] = {}
        self._waiting: dict[str, dict[Connection, float]] = {}
        self._num_by_address: dict[str, int] = {}
        self._answering: set[Connection] = set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._on_room: Callable[[], None] = lambda: None

    @property
    def num_waiting(self) -> int:
        """Connections that may be made to go."""
        return sum(map(len, self._waiting.values()))

    @property
    def num_answering(self) -> int:
        """Connections whose request is being answered."""
        return len(self._answering)

    def __len__(self) -> int:
        return len(self._addresses)

    def call_when_room(self, call: Callable[[], None]) -> None:
        """Set what is called each time when a connection has gone or can be made to go."""
        self._on_room = call

    def make_room(self) -> bool:
        """Ensure room for one more, at the cost of a waiting connection; False if every connection is busy."""
        if len(self) < self._max:
            return True
        largest_first = sorted(self._waiting, key=lambda one: -self._num_by_address[one])
        return any(map(self._evict, largest_first))

    def admits(self, address: str) -> bool:
        """Ensure room for one more of this address; False if all that it may hold are busy."""
        return self._num_by_address.get(address, 0) < self._max_per_address or self._evict(address)

    def add(self, connection: Connection, address: str) -> None:
        """Enter a new connection, which is waiting."""
        self._addresses[connection] = address
        self._num_by_address[address] = self._num_by_address.get(address, 0) + 1
        self.wait(connection)

    def wait(self, connection: Connection) -> None:
        """Note that the connection waits for its client from now on."""
        if (address := self._addresses.get(connection)) is not None:
            waiting = self._waiting.setdefault(address, {})
            waiting.pop(connection, None)
            waiting[connection] = self._clock()
            self._on_room()

    def begin(self, connection: Connection) -> None:
        """Note that a request begins to be answered."""
        self._answering.add(connection)
        self._is_idle.clear()

    def end(self, connection: Connection) -> None:
        """Note that its answer is written. Does nothing where none was begun."""
        self._answering.discard(connection)
        if not self._answering:
            self._is_idle.set()

    async def until_answered(self) -> None:
        """Block until no request is being answered."""
        await self._is_idle.wait()

    def work(self, connection: Connection) -> None:
        """Note that the connection has a complete request."""
        if (address := self._addresses.get(connection)) is not None:
            self._forget_waiting(connection, address)

    def remove(self, connection: Connection) -> None:
        """Forget a connection; does nothing for one that is not here."""
        self.end(connection)
        if (address := self._addresses.pop(connection, None)) is None:
            return
        self._forget_waiting(connection, address)
        self._num_by_address[address] -= 1
        if not self._num_by_address[address]:
            del self._num_by_address[address]
        self._on_room()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the three books agree."""
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
            if now - since < EVICTION_AGE_SECONDS:
                return False
            if connection.is_waiting:
                logger.warning("too many connections: one of %s that waits for its client is closed", address)
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
    """Return whom a socket's peer name counts as: an IPv4 address, or the /64 network of an IPv6 one."""
    host = str(name[0]) if isinstance(name, tuple) and name else ""
    if ":" not in host:
        return host
    packed = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    if packed[:12] == b"\0" * 10 + b"\xff\xff":
        return socket.inet_ntop(socket.AF_INET, packed[12:])
    return socket.inet_ntop(socket.AF_INET6, packed[:8] + bytes(8)) + "/64"
