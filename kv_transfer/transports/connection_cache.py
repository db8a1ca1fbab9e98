"""A receiver's connections to its sources: how they are made, cached between reads, and what their errors mean."""

import socket
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from contract.errors import KvbatonError, PeerUnreachableError, TransferError
from kv_transfer.links.framing import ShortReadError, parse_address, read_frame
from kv_transfer.protocol.reads import Read, ReadStoppedError, Source, StaleLeaseError, broken_connection
from kv_transfer.transports.data_handshake import MAX_DATA_FRAME_BYTES, DataReply, DataStatus, prove_session


def unconnected(source: Source, timeout_seconds: float) -> socket.socket:
    """Return a socket for ``dial``, with this timeout for every operation."""
    family = socket.AF_INET6 if ":" in parse_address(source.address)[0] else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.settimeout(timeout_seconds)
    return sock


def dial(sock: socket.socket, source: Source) -> None:
    """Connect to a peer's data port, and prove the session to each other. Raises PeerUnreachableError (refused), OSError."""
    try:
        sock.connect(parse_address(source.address))
    except UnicodeError as error:  # the host name cannot be encoded
        raise PeerUnreachableError(f"worker {source.worker_id} cannot be dialed: {error}") from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    prove_session(sock, source)
    reply = read_frame(sock, DataReply, MAX_DATA_FRAME_BYTES)
    if reply.status is not DataStatus.OK:
        raise PeerUnreachableError(f"worker {source.worker_id} refused a data connection: {reply.message}")


class Cached(Protocol):
    """A connection to one source, or anything else that a receiver keeps for it."""

    def interrupt(self) -> None:
        """Make its user fail soon. Called from any thread; does not block, and closes nothing."""

    def close(self) -> None:
        """Release everything. Called exactly once, when it is not in use."""


_C = TypeVar("_C", bound=Cached)


class ConnectionCache(Generic[_C]):
    """Owns one connection per source; safe for one thread per source.

    A connection is closed at the end of a use that failed, unless by the error ``harmless``, else by ``forget`` or
    ``close``. make: returns a connection, which need not be established. has_ended: tests an unused connection; one
    that has ended is replaced. kind: the word for a connection in error texts.
    """

    def __init__(
        self,
        make: Callable[[Source], _C],
        *,
        harmless: type[KvbatonError] | None = None,
        has_ended: Callable[[_C], bool] | None = None,
        kind: str = "data connection",
    ) -> None:
        self._make = make
        self._harmless = harmless
        self._has_ended = has_ended
        self._kind = kind
        self._lock = threading.Lock()
        self._cached: dict[Source, _C] = {}
        self._in_use: set[_C] = set()
        self._is_closed = False

    def using(self, source: Source, read: Read) -> "_Use[_C]":
        """Return a context in which this source's connection is in use, for this read.

        Raises there ReadStoppedError if the read was stopped, StaleLeaseError as it is, PeerUnreachableError for a broken
        connection, TransferError else.
        """
        return _Use(self, source, read)

    def take(self, source: Source) -> _C:
        """Return this source's connection, and mark it as in use. Raises TransferError after ``close``."""
        with self._lock:
            if self._is_closed:
                raise TransferError("the receiver is closed")
            cached = self._cached.get(source)
            if cached is not None and cached not in self._in_use and self._is_over(cached):
                del self._cached[source]
                cached.close()
                cached = None
            if cached is None:
                cached = self._cached[source] = self._make(source)
            self._in_use.add(cached)
            return cached

    def put_back(self, source: Source, cached: _C, error: BaseException | None) -> None:
        """End a use, which failed with this error if any."""
        is_good = error is None or (self._harmless is not None and isinstance(error, self._harmless))
        with self._lock:
            self._in_use.discard(cached)
            is_cached = self._cached.get(source) is cached
            if is_cached and is_good:
                return
            if is_cached:
                del self._cached[source]
        cached.close()

    def error_of_read(self, error: OSError | TransferError, source: Source, read: Read) -> KvbatonError:
        """Return the error that ``fetch`` raises for one that occurred in a use."""
        if isinstance(error, StaleLeaseError):
            return error
        if read.is_stopped:
            return ReadStoppedError("the read was stopped")
        if isinstance(error, (ShortReadError, ConnectionError)):
            return PeerUnreachableError(f"worker {source.worker_id} closed its {self._kind}: {error}")
        if isinstance(error, OSError):
            return broken_connection(error, f"reading from worker {source.worker_id} failed: {error}")
        return error

    def forget(self, source: Source) -> None:
        """Close this source's connection, or interrupt its user, who closes it then."""
        with self._lock:
            cached = self._cached.pop(source, None)
            if cached is None:
                return
            if cached in self._in_use:
                cached.interrupt()
                return
        cached.close()

    def close(self) -> None:
        """Drop all connections, and make no more. Idempotent."""
        with self._lock:
            self._is_closed = True
            sources = list(self._cached)
        for source in sources:
            self.forget(source)

    def _is_over(self, cached: _C) -> bool:
        return self._has_ended is not None and self._has_ended(cached)


class _Use(Generic[_C]):
    """See ``ConnectionCache.using``. Not a generator: every read enters this, mostly with cold caches."""

    def __init__(self, cache: ConnectionCache[_C], source: Source, read: Read) -> None:
        self._cache = cache
        self._source = source
        self._read = read

    def __enter__(self) -> _C:
        self._read.check()
        try:
            self._cached = self._cache.take(self._source)
        except OSError as error:
            raise self._cache.error_of_read(error, self._source, self._read) from error
        return self._cached

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._cache.put_back(self._source, self._cached, error)
        if isinstance(error, (OSError, TransferError)):
            mapped = self._cache.error_of_read(error, self._source, self._read)
            if mapped is not error:
                raise mapped from error
