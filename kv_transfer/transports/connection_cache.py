"""A receiver's connections to its sources: how they are made, cached between reads, and what their errors mean."""

import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

from contract.errors import PeerUnreachableError, TransferError
from kv_transfer.links.framing import ShortReadError, parse_address, read_frame
from kv_transfer.protocol.reads import (
    Read,
    ReadRequest,
    ReadStoppedError,
    Source,
    StaleLeaseError,
    broken_connection,
)
from kv_transfer.transports.data_handshake import MAX_DATA_FRAME_BYTES, DataReply, DataStatus, prove_session
from kv_transfer.transports.data_port import shutdown
from kv_transfer.transports.transport import ReceiverTraits

_T = TypeVar("_T")


class PeerConnection(ABC):
    """A connection to one source, and what a receiver keeps with it. Used by one thread at a time.

    timeout_seconds: for every operation of its socket.
    """

    def __init__(self, source: Source, family: socket.AddressFamily, timeout_seconds: float) -> None:
        self._source = source
        self._who = f"worker {source.worker_id}"
        self._timeout_seconds = timeout_seconds
        self._is_interrupted = False
        self._sock = socket.socket(family, socket.SOCK_STREAM)
        self._sock.settimeout(timeout_seconds)

    @abstractmethod
    def connect(self, read: Read) -> object:
        """Establish it at the first call. Raises what ``fetch`` would."""

    @abstractmethod
    def fetch(self, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        """Do what ``ReceiverTransport.fetch`` does. Raises OSError too."""

    def probe(self, read: Read) -> float | None:
        """Do what ``ProbingReceiver.probe`` does; by default, connect. Raises OSError too."""
        self.connect(read)
        return None

    def must_be_replaced(self, request: ReadRequest | None) -> bool:
        """Test if a connection that is not in use cannot be used for this request, or for a probe (None)."""
        return False

    def interrupt(self) -> None:
        """Make its user fail soon. Called from any thread; does not block, and closes nothing."""
        self._is_interrupted = True
        shutdown(self._sock)

    def close(self) -> None:
        """Release everything. Called exactly once, when it is not in use."""
        self._sock.close()

    def _check_link(self) -> None:
        if self._is_interrupted:
            raise TransferError(f"the link to {self._who} is gone")


def rate_of(work: Callable[[], object], num_bytes: int) -> float:
    """Return at how many bytes per second ``work`` reads so many bytes at its second call: the first one sets things up."""
    work()
    begin = time.monotonic()
    work()
    return num_bytes / max(time.monotonic() - begin, 1e-9)


class DataPortConnection(PeerConnection):
    """A connection to a source's data port."""

    def __init__(self, source: Source, timeout_seconds: float) -> None:
        is_v6 = ":" in parse_address(source.address)[0]
        super().__init__(source, socket.AF_INET6 if is_v6 else socket.AF_INET, timeout_seconds)

    def _dial(self) -> None:
        """Connect, and prove the session to each other. Raises PeerUnreachableError (refused), OSError."""
        try:
            self._sock.connect(parse_address(self._source.address))
        except UnicodeError as error:  # the host name cannot be encoded
            raise PeerUnreachableError(f"{self._who} cannot be dialed: {error}") from error
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        prove_session(self._sock, self._source)
        reply = read_frame(self._sock, DataReply, MAX_DATA_FRAME_BYTES)
        if reply.status is not DataStatus.OK:
            raise PeerUnreachableError(f"{self._who} refused a data connection: {reply.message}")


class PeerReceiver:
    """Owns one connection per source; safe for one thread per source. Base of the receivers.

    A connection is closed at the end of a use that failed, else by ``forget`` or ``close``. new_connection: need not
    establish it. keeps_stale: a stale lease does not close the connection. kind: its name in error texts.
    """

    traits = ReceiverTraits()

    def __init__(
        self,
        new_connection: Callable[[Source], PeerConnection],
        *,
        keeps_stale: bool = True,
        kind: str = "data connection",
    ) -> None:
        self._new_connection = new_connection
        self._keeps_stale = keeps_stale
        self._kind = kind
        self._lock = threading.Lock()
        self._cached: dict[Source, PeerConnection] = {}
        self._in_use: set[PeerConnection] = set()
        self._is_closed = False

    def fetch(self, source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        """See ``ReceiverTransport``. Raises PeerUnreachableError for a broken connection."""
        self._use(source, read, lambda connection: connection.fetch(request, views, read), request)

    def probe(self, source: Source, read: Read) -> float | None:
        """See ``ProbingReceiver``."""
        return self._use(source, read, lambda connection: connection.probe(read))

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

    def _unused(self, source: Source) -> PeerConnection | None:
        """Return this source's connection if there is one that nothing uses."""
        with self._lock:
            cached = self._cached.get(source)
            return None if cached in self._in_use else cached

    def _reserve_unused(self, source: Source) -> PeerConnection | None:
        """Return this source's connection, in use now, if there is one that nothing uses."""
        with self._lock:
            cached = self._cached.get(source)
            if cached is None or cached in self._in_use:
                return None
            self._in_use.add(cached)
            return cached

    def _use(
        self,
        source: Source,
        read: Read,
        work: Callable[[PeerConnection], _T],
        request: ReadRequest | None = None,
    ) -> _T:
        """Return what ``work`` does with the source's connection. Raises what ``ReceiverTransport.fetch`` does."""
        read.check()
        cached: PeerConnection | None = None
        is_good = False
        try:
            cached = self._reserve(source, request)
            outcome = work(cached)
            is_good = True
            return outcome
        except StaleLeaseError:
            # The connection itself is in order, unless the sender closes it after such an answer.
            is_good = self._keeps_stale
            raise
        except (OSError, TransferError) as error:
            if read.is_stopped:
                raise ReadStoppedError("the read was stopped") from error
            who = f"worker {source.worker_id}"
            if isinstance(error, (ShortReadError, ConnectionError)):
                raise PeerUnreachableError(f"{who} closed its {self._kind}: {error}") from error
            if isinstance(error, OSError):
                raise broken_connection(error, f"reading from {who} failed: {error}") from error
            raise
        finally:
            if cached is not None:
                self._put_back(source, cached, is_good=is_good)

    def _reserve(self, source: Source, request: ReadRequest | None) -> PeerConnection:
        """Return this source's connection, and mark it as in use. Raises TransferError after ``close``."""
        with self._lock:
            if self._is_closed:
                raise TransferError("the receiver is closed")
            cached = self._cached.get(source)
            if cached is not None and cached not in self._in_use and cached.must_be_replaced(request):
                del self._cached[source]
                cached.close()
                cached = None
            if cached is None:
                cached = self._cached[source] = self._new_connection(source)
            self._in_use.add(cached)
            return cached

    def _put_back(self, source: Source, cached: PeerConnection, *, is_good: bool) -> None:
        with self._lock:
            self._in_use.discard(cached)
            is_cached = self._cached.get(source) is cached
            if is_cached and is_good:
                return
            if is_cached:
                del self._cached[source]
        cached.close()
