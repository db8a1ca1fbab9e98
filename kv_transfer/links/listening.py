"""Accept connections: without free descriptors the listener pauses, and a flood does not displace an honest peer.

Few connections are accepted between two looks at those that can be read (``Listener.accept_some``). A connection whose peer
is not authenticated yet may be closed for a new one: that of the address that holds the most, a silent one first.
"""

import errno
import logging
import math
import resource
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

from contract.addresses import ALL

logger = logging.getLogger(__name__)
MAX_UNAUTHENTICATED = 256
_MIN_UNAUTHENTICATED = 8
_DESCRIPTOR_SHARE = 8
# The kernel drops connection attempts while the backlog is full, and their dialers try again after seconds.
_BACKLOG = 1024
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_PAUSE_SECONDS = 0.2
_ACCEPTS_AT_ONCE = 4
_REST = 3


def listen_on(host: str, port: int) -> socket.socket:
    """Open a listening TCP socket; ``ALL`` listens on the addresses of both families. Raises OSError."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if host == ALL:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


class Listener:
    """A non-blocking TCP listener in one selector. Only ``close`` may be called outside the selector's thread.

    A connection that cannot be accepted for lack of descriptors stays in the backlog, where it would keep the listener
    readable. So the listener leaves the selector until ``resume_at``, when ``watch`` puts it back.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.setblocking(False)
        self.port: int = 0 if sock.family == socket.AF_UNIX else sock.getsockname()[1]
        self.resume_at = math.inf
        self._is_watched = False
        self._is_short = False

    def watch(self, selector: selectors.BaseSelector, data: Any = None) -> None:
        """Register with ``data``, or unregister during a pause. Call it before every select."""
        if time.monotonic() >= self.resume_at:
            self.resume_at = math.inf
        is_wanted = self.resume_at == math.inf
        if is_wanted and not self._is_watched:
            selector.register(self._sock, selectors.EVENT_READ, data)
        elif not is_wanted and self._is_watched:
            selector.unregister(self._sock)
        self._is_watched = is_wanted

    def accept_some(self) -> Iterator[socket.socket]:
        """Yield a few connections, then pause three times as long as the caller took with them.

        So open connections are read before there are too many, and a burst leaves the processor to other threads.
        """
        began = time.monotonic()
        for _ in range(_ACCEPTS_AT_ONCE):
            sock = self.accept()
            if sock is None:
                break
            yield sock
        if self.resume_at == math.inf:
            now = time.monotonic()
            self.resume_at = now + _REST * (now - began)

    def accept(self) -> socket.socket | None:
        """Return the next connection, or None if there is none or no descriptor for it (then pause)."""
        try:
            sock = self._sock.accept()[0]
        except OSError as error:  # any other error: the dialer has given up already
            if error.errno in _EXHAUSTED:
                self.pause(f"accepting failed: {error}")
            return None
        self._is_short = False
        return sock

    def pause(self, reason: str) -> None:
        """Accept nothing for a moment. Logged once until a connection is accepted again."""
        self.resume_at = time.monotonic() + _PAUSE_SECONDS
        if not self._is_short:
            logger.error("no connection is accepted on port %d for the time being: %s", self.port, reason)
        self._is_short = True

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._sock.close()


class Unauthenticated(Protocol):
    """A connection whose peer is not known yet."""

    host: str
    heard_at: float

    @property
    def has_spoken(self) -> bool:
        """True if the peer's first message was valid."""


_S = TypeVar("_S", bound=Unauthenticated)


def max_unauthenticated(most: int, limit: int | None = None) -> int:
    """Return how many a listener may hold: ``most``, but at most an eighth of the process's descriptors.

    limit: on open descriptors; None: the limit of this process.
    """
    if limit is None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return most
    return min(most, max(_MIN_UNAUTHENTICATED, limit // _DESCRIPTOR_SHARE))


def choose_displaced(unauthenticated: Iterable[_S]) -> _S:
    """Return the connection to close when there are too many; ``unauthenticated`` must not be empty."""
    listed = list(unauthenticated)
    per_host = Counter(one.host for one in listed)
    most = max(per_host.values())
    crowd = (one for one in listed if per_host[one.host] == most)
    return min(crowd, key=lambda one: (one.has_spoken, one.heard_at))


def host_of(sock: socket.socket) -> str:
    """Return the peer's address without its port, or "" if the peer has gone already."""
    try:
        return str(sock.getpeername()[0])
    except OSError:
        return ""


class LogLimiter:
    """Admits one log line in ``seconds`` and counts those that it suppresses."""

    def __init__(self, seconds: float = 1.0, now: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._now = now
        self._due_at = 0.0
        self._num_suppressed = 0

    def admit(self) -> int | None:
        """Return how many lines were suppressed since the last one, or None to suppress this one."""
        if self._now() < self._due_at:
            self._num_suppressed += 1
            return None
        num_suppressed = self._num_suppressed
        self._num_suppressed = 0
        self._due_at = self._now() + self._seconds
        return num_suppressed
