"""How the two ends of a data connection prove that they belong to one control link's session. No I/O.

The reader sends DataHello, the lender DataChallenge, the reader DataProve. The session's token is the key and never crosses
the connection, so whoever listens at a dead worker's address is given nothing. Proofs cover the transport, the direction and
a nonce of either end: they are good on one connection only.
"""

import secrets

import msgspec

from contract.errors import PeerUnreachableError, UnauthenticatedError
from contract.proofs import derive_key, is_proof, make_proof
from kv_transfer.protocol.reads import Source
from kv_transfer.transports.data_wire import DataChallenge, DataHello, DataProve, DataStatus
from kv_transfer.transports.leases import Sessions, session_name

_LENDER = "data lender"
_READER = "data reader"
UNKNOWN = "no control link stands behind this connection"


class Reading:
    """The reader's end of one connection."""

    def __init__(self, source: Source) -> None:
        self._key = _key(source.token)
        self._who = f"worker {source.worker_id}"
        self.hello = DataHello(session_name(source.token), source.transport, secrets.token_hex(16))

    def prove(self, challenge: DataChallenge) -> DataProve:
        """Answer the lender. Raises PeerUnreachableError where it refuses, or where it is not the session's lender."""
        if challenge.status is not DataStatus.OK:
            raise PeerUnreachableError(f"{self._who} refused a data connection: {challenge.message}")
        said = _said(self.hello, challenge)
        if not is_proof(self._key, challenge.proof, _LENDER, *said):
            raise PeerUnreachableError(
                f"{self._who} does not hold this session's token: another process listens there"
            )
        return DataProve(make_proof(self._key, _READER, *said))


class Lending:
    """The lender's end of one connection. transport: what it lends by."""

    def __init__(self, sessions: Sessions, transport: str) -> None:
        self._sessions = sessions
        self._transport = transport
        self._token: str | None = None
        self._said: tuple[str, ...] = ()

    def challenge(self, hello: DataHello) -> DataChallenge:
        """Answer the reader; a session that is not known, or another transport, is denied."""
        self._token = self._sessions.find(hello.session)
        if self._token is None or hello.transport != self._transport:
            self._token = None
            return DataChallenge(DataStatus.DENIED, UNKNOWN)
        unproved = DataChallenge(DataStatus.OK, nonce=secrets.token_hex(16))
        self._said = _said(hello, unproved)
        return msgspec.structs.replace(unproved, proof=make_proof(_key(self._token), _LENDER, *self._said))

    def check(self, prove: DataProve) -> str:
        """Return the token of the session that the reader has proved. Raises UnauthenticatedError."""
        token = self._token
        if token is None or not is_proof(_key(token), prove.proof, _READER, *self._said):
            raise UnauthenticatedError(UNKNOWN)
        return token


def _key(token: str) -> bytes:
    return derive_key(token, "data connections")


def _said(hello: DataHello, challenge: DataChallenge) -> tuple[str, ...]:
    return hello.transport, hello.session, hello.nonce, challenge.nonce
