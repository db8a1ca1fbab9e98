"""How two workers meet: versions, mutual proof of the cluster secret, identity, model, layout, transport. No I/O.

Nothing about the model is said before the other side has proved that it belongs to the cluster, and nothing that the other
side says is believed unless it is under that side's proof (``transcript``) and is what was asked for. Each side raises the
error that it refuses the other with; it also travels back as ``Refused``.
"""

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from contract.decoding import shown
from contract.errors import (
    ErrorKind,
    IncompatiblePeerError,
    KvbatonError,
    UnauthenticatedError,
    WorkerLostError,
    error_from_kind,
)
from contract.identity import Role, why_no_name
from contract.layout import KVLayout, Side, weights_of
from kv_transfer.protocol.messages import (
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
from kv_transfer.protocol.plan import PeerTerms, terms_between
from kv_transfer.protocol.transcript import Mac, Transcript, mac_of

_CHALLENGE = "acceptor's challenge"
_PROVE = "dialer's proof"
_WELCOME = "acceptor's welcome"
_DIALER_REFUSES = "dialer's refusal"
_ACCEPTOR_REFUSES = "acceptor's refusal"
_WORKERS = frozenset(Role) - {Role.ROUTER}
_UNPROVED_KINDS = frozenset({ErrorKind.UNAUTHENTICATED, ErrorKind.INCOMPATIBLE})
"""What a refusal without a proof may mean: that there will be no link. Anything else could end a request."""


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
    token: the key of this session's proofs, on data connections too; derived on both sides, never sent. terms: how the
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

    def __init__(self, me: LocalIdentity, target: PeerTarget, mac: Mac = mac_of) -> None:
        self._me = me
        self.target = target
        self._hello = Hello(
            PROTOCOL_MIN,
            PROTOCOL_MAX,
            secrets.token_hex(16),
            me.worker_id,
            me.boot_id,
            me.role,
            target.worker_id,
            target.boot_id,
        )
        self._transcript = Transcript(me.secret, mac)
        self._challenge: Challenge | None = None
        self.session: Session | None = None

    def begin(self) -> list[Message]:
        """Return what to send first. Called once."""
        self._transcript.add(self._hello)
        return [self._hello]

    def receive(self, message: Message) -> list[Message]:
        """Answer the acceptor. Raises the error that the handshake fails with."""
        where = f"worker {self.target.worker_id} at {self.target.address}"
        match message:
            case Refused() if self.session is None:
                is_proved = self._transcript.is_proved(_ACCEPTOR_REFUSES, message)
                raise _refusal(message, is_proved, f"{where} refused the control link")
            case Challenge() if self._challenge is None:
                return [self._prove(message, where)]
            case Welcome() if self._challenge is not None and self.session is None:
                self.session = self._open(self._challenge, message, where)
                return []
        raise UnauthenticatedError(f"{where} sent {type(message).__name__} in the middle of the handshake")

    @property
    def has_begun(self) -> bool:
        """Whether the acceptor has proved itself."""
        return self._challenge is not None

    def refusal(self, error: KvbatonError) -> Refused:
        """Return the last message to an acceptor that is given up."""
        return _proved_refusal(self._transcript, _DIALER_REFUSES, error)

    def _prove(self, challenge: Challenge, where: str) -> Prove:
        _common_protocol(challenge, where)
        if not self._transcript.is_proved(_CHALLENGE, challenge):
            raise UnauthenticatedError(f"{where} does not hold this cluster's secret")
        _check_names(challenge, where)
        self._check_target(challenge, where)
        self._transcript.add(challenge)
        self._challenge = challenge
        me = self._me
        unproved = Prove(
            "", me.model_fingerprint, me.layout, list(me.transports), me.timeout_seconds, me.num_ranks
        )
        prove = replace(unproved, proof=self._transcript.proof(_PROVE, unproved))
        self._transcript.add(prove)
        return prove

    def _check_target(self, challenge: Challenge, where: str) -> None:
        """Raise WorkerLostError where somebody else of this cluster answers than the one that was asked for."""
        asked = self.target
        found = challenge
        if (found.worker_id, found.boot_id) != (asked.worker_id, asked.boot_id):
            raise WorkerLostError(
                f"{where} was asked for as boot {asked.boot_id}; boot {found.boot_id} of worker"
                f" {found.worker_id} answers there: the one that was asked for is gone"
            )

    def _open(self, challenge: Challenge, welcome: Welcome, where: str) -> Session:
        me = self._me
        if not self._transcript.is_proved(_WELCOME, welcome):
            raise UnauthenticatedError(f"{where} sent a Welcome that is not the one of this session")
        if welcome.protocol != _common_protocol(challenge, where):
            raise IncompatiblePeerError(f"{where} wants to speak transfer protocol {welcome.protocol}")
        _check_patience(welcome, where)
        _agree(me, welcome, me.transports, [offer.transport for offer in welcome.offers], where)
        _check_addresses(welcome, where)
        self._transcript.add(welcome)
        return Session(
            challenge.worker_id,
            challenge.boot_id,
            challenge.role,
            welcome.timeout_seconds,
            tuple(welcome.offers),
            self._transcript.token(),
            terms_between(me.side, me.model_fingerprint, welcome.side, welcome.model_fingerprint),
        )


class Accepting:
    """The acceptor's half. ``session`` is set once the dialer's proof and offer were found good."""

    def __init__(self, me: LocalIdentity, mac: Mac = mac_of) -> None:
        self._me = me
        self._transcript = Transcript(me.secret, mac)
        self._hello: Hello | None = None
        self._challenge: Challenge | None = None
        self.session: Session | None = None

    def begin(self) -> list[Message]:
        """Return nothing: the dialer speaks first."""
        return []

    def receive(self, message: Message) -> list[Message]:
        """Answer the dialer. Raises the error that the dialer is refused with."""
        match message:
            case Refused() if self.session is None:
                is_proved = self._transcript.is_proved(_DIALER_REFUSES, message)
                raise _refusal(message, is_proved, "the dialing worker gave up")
            case Hello() if self._hello is None:
                return [self._challenge_for(message)]
            case Prove() if self._hello is not None and self._challenge is not None and self.session is None:
                return [self._welcome(message, self._hello)]
        raise UnauthenticatedError(f"{type(message).__name__} came in the middle of the handshake")

    @property
    def has_begun(self) -> bool:
        """Whether the dialer has said who it is."""
        return self._challenge is not None

    def refusal(self, error: KvbatonError) -> Refused:
        """Return the last message to a dialer that is refused."""
        return _proved_refusal(self._transcript, _ACCEPTOR_REFUSES, error)

    def _challenge_for(self, hello: Hello) -> Challenge:
        _check_names(hello, "the dialing worker")
        _common_protocol(hello, f"worker {hello.worker_id}")
        self._hello = hello
        me = self._me
        self._transcript.add(hello)
        unproved = Challenge(
            PROTOCOL_MIN, PROTOCOL_MAX, secrets.token_hex(16), me.worker_id, me.boot_id, me.role, proof=""
        )
        self._challenge = replace(unproved, proof=self._transcript.proof(_CHALLENGE, unproved))
        self._transcript.add(self._challenge)
        return self._challenge

    def _welcome(self, prove: Prove, hello: Hello) -> Welcome:
        me = self._me
        who = f"worker {hello.worker_id}"
        if not self._transcript.is_proved(_PROVE, prove):
            raise UnauthenticatedError(f"{who} does not hold this cluster's secret")
        if (hello.target_worker_id, hello.target_boot_id) != (me.worker_id, me.boot_id):
            raise WorkerLostError(
                f"{who} asked for boot {shown(hello.target_boot_id)} of worker {shown(hello.target_worker_id)};"
                f" this is boot {me.boot_id} of worker {me.worker_id}"
            )
        _check_patience(prove, who)
        offers = me.offers()
        _agree(me, prove, [offer.transport for offer in offers], prove.transports, who)
        self._transcript.add(prove)
        unproved = Welcome(
            _common_protocol(hello, who),
            me.model_fingerprint,
            me.layout,
            offers,
            me.timeout_seconds,
            me.num_ranks,
        )
        welcome = replace(unproved, proof=self._transcript.proof(_WELCOME, unproved))
        self._transcript.add(welcome)
        self.session = Session(
            hello.worker_id, hello.boot_id, hello.role, prove.timeout_seconds, (), self._transcript.token()
        )
        return welcome


def _proved_refusal(transcript: Transcript, label: str, error: KvbatonError) -> Refused:
    unproved = Refused(error.kind, error.message)
    return replace(unproved, proof=transcript.proof(label, unproved))


def _refusal(message: Refused, is_proved: bool, what: str) -> KvbatonError:
    """Return the error that a refusal stands for; without a proof it says no more than that there is no link."""
    is_believed = is_proved or message.kind in _UNPROVED_KINDS
    kind = message.kind if is_believed else ErrorKind.UNAUTHENTICATED
    return error_from_kind(kind, f"{what}: {shown(message.message)}")


def _check_names(peer: Hello | Challenge, who: str) -> None:
    """Raise UnauthenticatedError for an id that is no name, or a role that no worker has."""
    for field in ("worker_id", "boot_id"):
        if why := why_no_name(getattr(peer, field)):
            raise UnauthenticatedError(f"{who} has a {field} that is no name: {why}")
    if peer.role not in _WORKERS:
        raise UnauthenticatedError(
            f"{who} has role {shown(peer.role, 20)}; workers are {', '.join(sorted(_WORKERS))}"
        )


def _check_patience(peer: Prove | Welcome, who: str) -> None:
    if not (math.isfinite(peer.timeout_seconds) and peer.timeout_seconds > 0):
        raise IncompatiblePeerError(
            f"{who} has timeout_seconds {peer.timeout_seconds}; it must be finite and above 0"
        )


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
