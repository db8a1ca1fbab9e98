"""How two workers meet: versions, mutual proof of the cluster secret, identity, model, layout, transport. No I/O.

Nothing about the model is said before the other side has proved that it belongs to the cluster. Each side raises the
error that it refuses the other with; the acceptor's also travels back as ``Refused``.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from contract.errors import IncompatiblePeerError, UnauthenticatedError, WorkerLostError, error_from_kind
from contract.identity import proof, proof_matches
from contract.layout import KVLayout, Side, weights_of
from kv_transfer.messages import (
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    Challenge,
    Hello,
    Message,
    Offer,
    Prove,
    Refused,
    Welcome,
)
from kv_transfer.plan import PeerTerms, terms_between

_ACCEPTOR, _DIALER, _DATA = "kv-control-acceptor", "kv-control-dialer", "kv-data"


@dataclass(frozen=True)
class LocalIdentity:
    """What this worker says about itself.

    layout: of one of its ranks. transports: the names that it can read over, best first. offers: what it lends over now.
    """

    worker_id: str
    boot_id: str
    role: str
    secret: str
    model_fingerprint: str
    layout: KVLayout
    transports: tuple[str, ...]
    timeout_seconds: float
    offers: Callable[[], list[Offer]]
    num_ranks: int = 1

    @property
    def side(self) -> Side:
        """How it keeps its KV."""
        return Side(self.layout, self.num_ranks)


@dataclass(frozen=True)
class PeerTarget:
    """Whom a dialer wants to reach: a worker's incarnation at an address."""

    worker_id: str
    boot_id: str
    address: str


@dataclass(frozen=True)
class Session:
    """A link that is up.

    timeout_seconds: how long the peer bears silence. offers: what the dialer may choose from, never empty for it.
    token: authenticates the dialer's data connections; derived on both sides, never sent on the link. terms: how the
    dialer makes its own KV of the peer's; None where nothing differs.
    """

    worker_id: str
    boot_id: str
    role: str
    timeout_seconds: float
    offers: tuple[Offer, ...]
    token: str
    terms: PeerTerms | None = None


class Dialing:
    """The dialer's half. ``session`` is set once the acceptor's Welcome was found good."""

    def __init__(self, me: LocalIdentity, target: PeerTarget) -> None:
        self._me, self._target = me, target
        self._hello = Hello(
            PROTOCOL_MIN, PROTOCOL_MAX, secrets.token_hex(16), me.worker_id, me.boot_id, me.role
        )
        self._challenge: Challenge | None = None
        self.session: Session | None = None

    def begin(self) -> list[Message]:
        """What to send first."""
        return [self._hello]

    def receive(self, message: Message) -> list[Message]:
        """Answer the acceptor. Raises the error that the handshake fails with."""
        where = f"worker {self._target.worker_id} at {self._target.address}"
        match message:
            case Refused():
                raise error_from_kind(message.kind, f"{where} refused the control link: {message.message}")
            case Challenge() if self._challenge is None:
                return [self._prove(message, where)]
            case Welcome() if self._challenge is not None and self.session is None:
                offered = [offer.transport for offer in message.offers]
                _agree(self._me, message, self._me.transports, offered, where)
                _check_addresses(message, where)
                self.session = self._open(self._challenge, message)
                return []
        raise UnauthenticatedError(f"{where} sent {type(message).__name__} in the middle of the handshake")

    def _prove(self, challenge: Challenge, where: str) -> Prove:
        _common_protocol(challenge, where)
        parts = _parts(self._hello, challenge)
        if not proof_matches(self._me.secret, challenge.proof, _ACCEPTOR, *parts):
            raise UnauthenticatedError(f"{where} does not hold this cluster's secret")
        if challenge.boot_id != self._target.boot_id:
            raise WorkerLostError(
                f"{where} was asked for as boot {self._target.boot_id}; boot {challenge.boot_id} of worker"
                f" {challenge.worker_id} answers there: the one that was asked for is gone"
            )
        self._challenge = challenge
        me = self._me
        dialer_proof = proof(me.secret, _DIALER, *parts)
        return Prove(
            dialer_proof,
            me.model_fingerprint,
            me.layout,
            list(me.transports),
            me.timeout_seconds,
            me.num_ranks,
        )

    def _open(self, challenge: Challenge, welcome: Welcome) -> Session:
        me = self._me
        token = proof(me.secret, _DATA, *_parts(self._hello, challenge))
        return Session(
            challenge.worker_id,
            challenge.boot_id,
            challenge.role,
            welcome.timeout_seconds,
            tuple(welcome.offers),
            token,
            terms_between(me.side, me.model_fingerprint, welcome.side, welcome.model_fingerprint),
        )


class Accepting:
    """The acceptor's half. ``session`` is set once the dialer's proof and offer were found good."""

    def __init__(self, me: LocalIdentity) -> None:
        self._me = me
        self._nonce = secrets.token_hex(16)
        self._hello: Hello | None = None
        self._challenge: Challenge | None = None
        self.session: Session | None = None

    def begin(self) -> list[Message]:
        """The dialer speaks first."""
        return []

    def receive(self, message: Message) -> list[Message]:
        """Answer the dialer. Raises the error that the dialer is refused with."""
        match message:
            case Refused():
                raise error_from_kind(message.kind, f"the dialing worker gave up: {message.message}")
            case Hello() if self._hello is None:
                return [self._challenge_for(message)]
            case Prove() if self._hello is not None and self._challenge is not None and self.session is None:
                return [self._welcome(message, self._hello, self._challenge)]
        raise UnauthenticatedError(f"{type(message).__name__} came in the middle of the handshake")

    def _challenge_for(self, hello: Hello) -> Challenge:
        _common_protocol(hello, f"worker {hello.worker_id}")
        me = self._me
        unproved = Challenge(
            PROTOCOL_MIN, PROTOCOL_MAX, self._nonce, me.worker_id, me.boot_id, me.role, proof=""
        )
        claimed = proof(me.secret, _ACCEPTOR, *_parts(hello, unproved))
        self._hello = hello
        self._challenge = Challenge(
            PROTOCOL_MIN, PROTOCOL_MAX, self._nonce, me.worker_id, me.boot_id, me.role, proof=claimed
        )
        return self._challenge

    def _welcome(self, prove: Prove, hello: Hello, challenge: Challenge) -> Welcome:
        parts, me = _parts(hello, challenge), self._me
        who = f"worker {hello.worker_id}"
        if not proof_matches(me.secret, prove.proof, _DIALER, *parts):
            raise UnauthenticatedError(f"{who} does not hold this cluster's secret")
        offers = me.offers()
        _agree(me, prove, [offer.transport for offer in offers], prove.transports, who)
        token = proof(me.secret, _DATA, *parts)
        self.session = Session(hello.worker_id, hello.boot_id, hello.role, prove.timeout_seconds, (), token)
        return Welcome(
            _common_protocol(hello, who),
            me.model_fingerprint,
            me.layout,
            offers,
            me.timeout_seconds,
            me.num_ranks,
        )


def _parts(hello: Hello, challenge: Challenge) -> tuple[str, ...]:
    """Everything that both sides said so far; a proof covers all of it."""
    said = (hello.protocol_min, hello.protocol_max, hello.nonce, hello.worker_id, hello.boot_id, hello.role)
    answered = (challenge.protocol_min, challenge.protocol_max, challenge.nonce)
    who = (challenge.worker_id, challenge.boot_id, challenge.role)
    return tuple(str(part) for part in said + answered + who)


def _common_protocol(peer: Hello | Challenge, who: str) -> int:
    if peer.protocol_min > PROTOCOL_MAX or peer.protocol_max < PROTOCOL_MIN:
        raise IncompatiblePeerError(
            f"{who} speaks transfer protocol {peer.protocol_min}..{peer.protocol_max};"
            f" this worker speaks {PROTOCOL_MIN}..{PROTOCOL_MAX}"
        )
    return min(PROTOCOL_MAX, peer.protocol_max)


def _agree(
    me: LocalIdentity, peer: Prove | Welcome, ours: Sequence[str], theirs: Sequence[str], who: str
) -> None:
    """Raise IncompatiblePeerError that names everything that differs and cannot be converted.

    One transport in common is enough. Both sides come to the same answer.
    """
    differences = me.side.differences(peer.side)
    if weights_of(me.model_fingerprint) != weights_of(peer.model_fingerprint):
        differences.append(
            f"model_fingerprint: ours is {me.model_fingerprint}, the peer's is {peer.model_fingerprint}"
        )
    if not set(ours) & set(theirs):
        differences.append(f"transport: ours is {_listed(ours)}, the peer's is {_listed(theirs)}")
    if differences:
        raise IncompatiblePeerError(f"{who} cannot hand KV over to this one: {'; '.join(differences)}")


def _check_addresses(welcome: Welcome, who: str) -> None:
    for offer in welcome.offers:
        if offer.num_ranks != welcome.num_ranks:
            raise IncompatiblePeerError(
                f"{who} offers {offer.transport} at {offer.num_ranks} addresses; it has {welcome.num_ranks} ranks"
            )


def _listed(names: Sequence[str]) -> str:
    return " or ".join(names) or "none"
