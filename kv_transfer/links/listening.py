"""A listening socket that bears a process without free descriptors: it pauses instead of spinning."""

import errno
import logging
import math
import selectors
import socket
import time
from collections.abc import Iterator
from typing import Any

logger = logging.getLogger(__name__)
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_PAUSE_SECONDS = 0.2
_ACCEPTS_AT_ONCE = 4
_REST = 3


class Listener:
    """A non-blocking listener in one selector. Used by the selector's thread, but for ``close``.

    A connection that cannot be accepted for want of descriptors stays in the backlog, where it would keep the listener
    readable. So the listener leaves the selector until ``resume_at``, when ``watch`` puts it back.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.setblocking(False)
        self.port: int = 0 if sock.family == socket.AF_UNIX else sock.getsockname()[1]
        self.resume_at = math.inf
        self._is_watched = self._is_short = False

    def watch(self, selector: selectors.BaseSelector, data: Any = None) -> None:
        """Be in the selector, with ``data``, but not during a pause. Call it before every select."""
        is_due = time.monotonic() >= self.resume_at
        if is_due:
            self.resume_at = math.inf
        is_wanted = self.resume_at == math.inf
        if is_wanted and not self._is_watched:
            selector.register(self._sock, selectors.EVENT_READ, data)
        elif not is_wanted and self._is_watched:
            selector.unregister(self._sock)
        self._is_watched = is_wanted

    def accept_some(self) -> Iterator[socket.socket]:
        """Yield a few connections, then rest for three times as long as they took the caller.

        Connections that are open are read before there are too many, and a burst leaves the process to other threads.
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
        """The next connection; None when there is none, or nothing to accept it with: then a pause begins."""
        try:
            sock = self._sock.accept()[0]
        except OSError as error:  # else the dialer has given up already
            if error.errno in _EXHAUSTED:
                self.pause(f"accepting failed: {error}")
            return None
        self._is_short = False
        return sock

    def pause(self, reason: str) -> None:
        """Accept nothing for a moment. Logged once until a connection is accepted again."""
        self.resume_at = time.monotonic() + _PAUSE_SECONDS
        if not self._is_short:
            logger.error(
                "no connection is accepted on port %d for now, again and again: %s", self.port, reason
            )
        self._is_short = True

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._sock.close()
