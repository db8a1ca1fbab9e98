"""Who has dialed a data port and proved nothing yet. One thread hears them all: each costs a socket and a few bytes."""

import math
import selectors
import socket
import time

from contract.errors import TransferError, UnauthenticatedError
from kv_transfer.links.framing import FrameBuffer, ShortReadError, decode_body, encode_frame
from kv_transfer.links.strangers import giving_way, host_of, most_strangers
from kv_transfer.transports.data_greeting import UNKNOWN, Lending
from kv_transfer.transports.data_wire import DataHello, DataProve, DataStatus

_MAX_STRANGERS = 64
_MAX_GREETING_BYTES = 1024
"""Of one frame of a greeting, which holds three short strings."""


class Stranger:
    """One connection that is being greeted. has_spoken: it has named a session that is open, which no stranger can.

    heard_at, due_at: when it came, and until when it may say who it is (monotonic seconds).
    """

    def __init__(self, sock: socket.socket, lending: Lending, heard_at: float, due_at: float) -> None:
        self.sock, self.host = sock, host_of(sock)
        self.heard_at, self.due_at = heard_at, due_at
        self.has_spoken = False
        self._lending = lending
        self._frames = FrameBuffer(_MAX_GREETING_BYTES)

    def hear(self) -> str | None:
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
    """Owns the strangers' sockets and their places in the selector. Used by one thread.

    patience_seconds: how long a greeting may take as a whole.
    """

    def __init__(self, selector: selectors.BaseSelector, patience_seconds: float) -> None:
        self._selector, self._patience_seconds = selector, patience_seconds
        self._most = most_strangers(_MAX_STRANGERS)
        self._strangers: dict[Stranger, None] = {}  # in the order in which they came

    def let_in(self, sock: socket.socket, lending: Lending) -> None:
        """Begin to hear a connection; the selector's key holds its Stranger. One too many costs another its place."""
        if len(self._strangers) >= self._most:
            self.dismiss(giving_way(self._strangers))
        sock.setblocking(False)
        now = time.monotonic()
        stranger = Stranger(sock, lending, now, now + self._patience_seconds)
        self._strangers[stranger] = None
        self._selector.register(sock, selectors.EVENT_READ, stranger)

    def dismiss(self, stranger: Stranger) -> None:
        """Close a stranger's connection."""
        self.release(stranger).close()

    def release(self, stranger: Stranger) -> socket.socket:
        """Give up a stranger, who is none any more, and return its socket."""
        del self._strangers[stranger]
        self._selector.unregister(stranger.sock)
        return stranger.sock

    def dismiss_late(self, now: float) -> float:
        """Dismiss who did not say who it is in time; return when the next one will be late, inf for nobody."""
        for stranger in [one for one in self._strangers if one.due_at <= now]:
            self.dismiss(stranger)
        return min((one.due_at for one in self._strangers), default=math.inf)

    def close(self) -> None:
        """Dismiss everybody."""
        for stranger in list(self._strangers):
            self.dismiss(stranger)
