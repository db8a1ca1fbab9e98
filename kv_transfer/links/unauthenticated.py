"""Connections whose peer has proved nothing yet: how many may be open, and which one gives way to a new one.

A flood must not cost an honest peer its place before it could answer. So few connections are accepted between two looks at
those that have something to say (``Listener.accept_some``), and room is made by the address that holds the most, first by a
silent connection.
"""

import resource
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

MAX_UNAUTHENTICATED = 256
_SHARE = 8
_FEWEST = 8
MAX_ACCEPTS_AT_ONCE = 4


def max_unauthenticated(most: int, limit: int | None = None) -> int:
    """Return how many a listener may hold: ``most``, and no more than an eighth of the descriptors of this process.

    limit: on open descriptors; None is this process's own.
    """
    if limit is None:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return most if limit == resource.RLIM_INFINITY else min(most, max(_FEWEST, limit // _SHARE))


class Unauthenticated(Protocol):
    """A connection whose peer is not known."""

    host: str
    heard_at: float

    @property
    def has_spoken(self) -> bool:
        """It sent a first message that was in order."""


_S = TypeVar("_S", bound=Unauthenticated)


def giving_way(unauthenticated: Iterable[_S]) -> _S:
    """Return which one is closed when there are too many. There must be one."""
    listed = list(unauthenticated)
    per_host = Counter(one.host for one in listed)
    most = max(per_host.values())
    crowd = (one for one in listed if per_host[one.host] == most)
    return min(crowd, key=lambda one: (one.has_spoken, one.heard_at))


def host_of(sock: socket.socket) -> str:
    """Return the peer's address without its port; empty where it has gone already."""
    try:
        return str(sock.getpeername()[0])
    except OSError:
        return ""


class Seldom:
    """Lets something be said once a while, with how often it was not said since."""

    def __init__(self, seconds: float = 1.0, now: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._now = now
        self._due_at = 0.0
        self._num_held = 0

    def ask(self) -> int | None:
        """Return how many were held back since the last time, None where this one is."""
        if self._now() < self._due_at:
            self._num_held += 1
            return None
        held = self._num_held
        self._num_held = 0
        self._due_at = self._now() + self._seconds
        return held
