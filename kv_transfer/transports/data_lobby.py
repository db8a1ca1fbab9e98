"""Connections to a data port that have proved nothing yet. One thread reads all: each costs a socket and a few bytes."""

import math
import selectors
import socket
import time

from contract.errors import TransferError, UnauthenticatedError
from kv_transfer.links.framing import FrameBuffer, ShortReadError, decode_body, encode_frame
from kv_transfer.links.listening import choose_displaced, host_of, max_unauthenticated
from kv_transfer.transports.data_greeting import UNKNOWN, Lending
from kv_transfer.transports.data_wire import DataHello, DataProve, DataStatus

_MAX_UNAUTHENTICATED = 64
_MAX_GREETING_BYTES = 1024
"""The longest frame of a greeting, which holds three short strings."""


class UnauthenticatedConnection:
    """One connection that is being greeted. has_spoken: it has named an open session, which takes its token.

    heard_at, due_at: when it was accepted, and the deadline of its greeting (monotonic seconds).
    """

    def __init__(self, sock: socket.socket, lending: Lending, heard_at: float, due_at: float) -> None:
        self.sock, self.host = sock, host_of(sock)
        self.heard_at = heard_at
        self.due_at = due_at
        self.has_spoken = False
        self._lending = lending
        self._frames = FrameBuffer(_MAX_GREETING_BYTES)

    def receive(self) -> str | None:
        """Take in what has arrived; return the session's token once it is proved.

        Raises OSError (closed), TransferError (not a greeting), UnauthenticatedError (not a session of ours).
        """
        try:
            data = self.sock.recv(_MAX_GREETING_BYTES)
        except BlockingIOError:
            return None
        if not data:
            raise ShortReadError(0, 1)
        token: str | None = None
        for body in self._frames.feed(data):
            if token is not None:
                raise TransferError("the peer goes on before it was answered")
            if self.has_spoken:
                token = self._lending.check(decode_body(body, DataProve))
            else:
                self._challenge(decode_body(body, DataHello))
        if token is not None and not self._frames.is_empty:
            raise TransferError("the peer goes on before it was answered")
        return token

    def _challenge(self, hello: DataHello) -> None:
        challenge = self._lending.challenge(hello)
        self.sock.sendall(encode_frame(challenge, _MAX_GREETING_BYTES))
        if challenge.status is not DataStatus.OK:
            raise UnauthenticatedError(UNKNOWN)
        self.has_spoken = True


class Lobby:
    """Owns the sockets of unauthenticated connections and their places in the selector. Used by one thread.

    patience_seconds: how long a greeting may take as a whole.
    """

    def __init__(self, selector: selectors.BaseSelector, patience_seconds: float) -> None:
        self._selector = selector
        self._patience_seconds = patience_seconds
        self._most = max_unauthenticated(_MAX_UNAUTHENTICATED)
        self._unauthenticated: dict[UnauthenticatedConnection, None] = {}  # in the order in which they came

    def let_in(self, sock: socket.socket, lending: Lending) -> None:
        """Begin to receive from a connection, which the selector's key holds. One too many costs another its place."""
        if len(self._unauthenticated) >= self._most:
            self.dismiss(choose_displaced(self._unauthenticated))
        sock.setblocking(False)
        now = time.monotonic()
        connection = UnauthenticatedConnection(sock, lending, now, now + self._patience_seconds)
        self._unauthenticated[connection] = None
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def dismiss(self, connection: UnauthenticatedConnection) -> None:
        """Close an unauthenticated connection."""
        self.release(connection).close()

    def release(self, connection: UnauthenticatedConnection) -> socket.socket:
        """Give up a connection, which is authenticated or over, and return its socket."""
        del self._unauthenticated[connection]
        self._selector.unregister(connection.sock)
        return connection.sock

    def dismiss_late(self, now: float) -> float:
        """Dismiss the connections whose deadline has passed; return the next deadline, inf if there is none."""
        for connection in [one for one in self._unauthenticated if one.due_at <= now]:
            self.dismiss(connection)
        return min((one.due_at for one in self._unauthenticated), default=math.inf)

    def close(self) -> None:
        """Dismiss all connections."""
        for connection in list(self._unauthenticated):
            self.dismiss(connection)
