"""The handshake of a data connection, by which both ends prove that they belong to one control link's session.

The receiver dials and sends DataHello, the sender answers DataChallenge, the receiver sends DataProve. The session's
token is the key and never crosses the connection, so a process that listens at a dead worker's address learns
nothing. Proofs cover the transport, the direction and a nonce of either end: each is valid on one connection only.

On a TCP port the sender then sends DataReply, and the transport's own messages follow. Its length is a multiple of
ALIGNMENT.
"""

import math
import secrets
import selectors
import socket
import time
from enum import StrEnum

import msgspec

from contract.errors import PeerUnreachableError, TransferError, UnauthenticatedError
from contract.proofs import derive_key, is_proof, make_proof
from kv_transfer.links.framing import (
    FrameBuffer,
    ShortReadError,
    decode_body,
    encode_frame,
    read_frame,
    write_frame,
)
from kv_transfer.links.listening import choose_displaced, host_of, max_unauthenticated
from kv_transfer.protocol.reads import Source
from kv_transfer.transports.leases import Sessions, session_name
from kv_transfer.transports.transport import TransportContext

MAX_DATA_FRAME_BYTES = 65536
ALIGNMENT = 64
UNKNOWN_SESSION = "no control link stands behind this connection"
_LENDER = "data lender"
_READER = "data reader"
_MAX_PENDING = 64
# A frame of a handshake holds three short strings; more is not read of a peer that has proved nothing.
_MAX_HANDSHAKE_BYTES = 1024


class DataStatus(StrEnum):
    """OK, or why not. STALE: no such lease (any more). DENIED: no such session."""

    OK = "ok"
    STALE = "stale"
    DENIED = "denied"


class DataHello(msgspec.Struct, frozen=True):
    """The receiver's first message. session: the name of the session's token."""

    session: str
    transport: str
    nonce: str


class DataChallenge(msgspec.Struct, frozen=True):
    """The sender's nonce, and its proof over both nonces. DENIED: without them; ``message`` has the reason."""

    status: DataStatus
    message: str = ""
    nonce: str = ""
    proof: str = ""


class DataProve(msgspec.Struct, frozen=True):
    """The receiver's proof over both nonces."""

    proof: str


class DataReply(msgspec.Struct, frozen=True):
    """The outcome of a request. padding: fills the frame up to its length."""

    status: DataStatus
    message: str = ""
    padding: bytes = b""


def reply_frame(status: DataStatus, message: str = "") -> bytes:
    """Return the frame of a DataReply, padded to a multiple of ALIGNMENT bytes."""
    length = len(encode_frame(DataReply(status, message), MAX_DATA_FRAME_BYTES))
    return encode_frame(DataReply(status, message, bytes(-length % ALIGNMENT)), MAX_DATA_FRAME_BYTES)


class ReaderProofs:
    """The receiver's end of one handshake. No I/O."""

    def __init__(self, source: Source) -> None:
        self._key = _key(source.token)
        self._who = f"worker {source.worker_id}"
        self.hello = DataHello(session_name(source.token), source.transport, secrets.token_hex(16))

    def prove(self, challenge: DataChallenge) -> DataProve:
        """Answer the lender. Raises PeerUnreachableError if it refuses, or does not prove the session."""
        if challenge.status is not DataStatus.OK:
            raise PeerUnreachableError(f"{self._who} refused a data connection: {challenge.message}")
        proved = _proved(self.hello, challenge)
        if not is_proof(self._key, challenge.proof, _LENDER, *proved):
            raise PeerUnreachableError(
                f"{self._who} does not hold this session's token: another process listens there"
            )
        return DataProve(make_proof(self._key, _READER, *proved))


class LenderProofs:
    """The sender's end of one handshake, for a transport. No I/O."""

    def __init__(self, sessions: Sessions, transport: str) -> None:
        self._sessions = sessions
        self._transport = transport
        self._token: str | None = None
        self._proved: tuple[str, ...] = ()

    def challenge(self, hello: DataHello) -> DataChallenge:
        """Answer the reader. An unknown session or another transport is denied."""
        token = self._sessions.find(hello.session)
        if token is None or hello.transport != self._transport:
            return DataChallenge(DataStatus.DENIED, UNKNOWN_SESSION)
        unproved = DataChallenge(DataStatus.OK, nonce=secrets.token_hex(16))
        self._token = token
        self._proved = _proved(hello, unproved)
        return msgspec.structs.replace(unproved, proof=make_proof(_key(token), _LENDER, *self._proved))

    def check(self, prove: DataProve) -> str:
        """Return the token of the session that the reader has proved. Raises UnauthenticatedError."""
        token = self._token
        if token is None or not is_proof(_key(token), prove.proof, _READER, *self._proved):
            raise UnauthenticatedError(UNKNOWN_SESSION)
        return token


def _key(token: str) -> bytes:
    return derive_key(token, "data connections")


def _proved(hello: DataHello, challenge: DataChallenge) -> tuple[str, ...]:
    return hello.transport, hello.session, hello.nonce, challenge.nonce


def prove_session(sock: socket.socket, source: Source) -> None:
    """Run the receiver's end on a blocking socket. Raises PeerUnreachableError, OSError."""
    proofs = ReaderProofs(source)
    write_frame(sock, proofs.hello, MAX_DATA_FRAME_BYTES)
    challenge = read_frame(sock, DataChallenge, MAX_DATA_FRAME_BYTES)
    write_frame(sock, proofs.prove(challenge), MAX_DATA_FRAME_BYTES)


class UnauthenticatedConnection:
    """The sender's end of one connection whose handshake is not complete.

    heard_at: when it was accepted (monotonic seconds). has_spoken: it has named an open session.
    """

    def __init__(self, sock: socket.socket, proofs: LenderProofs) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.host = "" if sock.family == socket.AF_UNIX else host_of(sock)
        self.heard_at = time.monotonic()
        self.has_spoken = False
        self._proofs = proofs
        self._frames = FrameBuffer(_MAX_HANDSHAKE_BYTES)

    def receive(self) -> str | None:
        """Return the session's token once it is proved. Raises OSError (closed), TransferError, UnauthenticatedError."""
        try:
            data = self.sock.recv(_MAX_HANDSHAKE_BYTES)
        except BlockingIOError:
            return None
        if not data:
            raise ShortReadError(0, 1)
        for body in self._frames.feed(data):
            if not self.has_spoken:
                challenge = self._proofs.challenge(decode_body(body, DataHello))
                self.sock.sendall(encode_frame(challenge, _MAX_HANDSHAKE_BYTES))
                if challenge.status is not DataStatus.OK:
                    raise UnauthenticatedError(UNKNOWN_SESSION)
                self.has_spoken = True
                continue
            token = self._proofs.check(decode_body(body, DataProve))
            if not self._frames.is_empty:
                raise TransferError("the peer goes on before it was answered")
            return token
        return None


class PendingHandshakes:
    """Owns the unauthenticated connections of a port and their places in its selector. Used by one thread."""

    def __init__(self, selector: selectors.BaseSelector, context: TransportContext, transport: str) -> None:
        self._selector = selector
        self._context = context
        self._transport = transport
        self._limit = max_unauthenticated(_MAX_PENDING)
        self._pending: dict[UnauthenticatedConnection, None] = {}  # in the order in which they were accepted

    def add(self, sock: socket.socket) -> None:
        """Receive from a new connection, which becomes the data of its selector key. At the limit, drop another one."""
        if len(self._pending) >= self._limit:
            self.drop(choose_displaced(self._pending))
        proofs = LenderProofs(self._context.sessions, self._transport)
        connection = UnauthenticatedConnection(sock, proofs)
        self._pending[connection] = None
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def drop(self, connection: UnauthenticatedConnection) -> None:
        """Close a connection."""
        self.release(connection).close()

    def release(self, connection: UnauthenticatedConnection) -> socket.socket:
        """Give a connection up and return its socket."""
        del self._pending[connection]
        self._selector.unregister(connection.sock)
        return connection.sock

    def drop_late(self, now: float) -> float:
        """Close the connections whose deadline has passed; return the next deadline, inf if there is none."""
        for connection in list(self._pending):
            due_at = connection.heard_at + self._context.settings.read_timeout_seconds
            if due_at > now:
                return due_at
            self.drop(connection)
        return math.inf

    def close(self) -> None:
        """Close all connections."""
        for connection in list(self._pending):
            self.drop(connection)
