"""The handshake of two workers: versions, mutual proof of the cluster secret, identity, model, layout, transport. No I/O.

A dialer sends nothing about the model before the acceptor has proved that it belongs to the cluster. A message is believed
only if it is covered by its sender's proof (``Transcript``) and fits what was asked for. Each side raises the error that it
refuses the other with; the error is also sent as ``Refused``.
"""

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from contract.cache_layout import CacheGroup, GroupedSide
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
from contract.layout import Side, weights_of
from contract.state_layout import StateLayout
from kv_transfer.options import LinkSettings
from kv_transfer.protocol.digests import DIGESTS, XXH3_64
from kv_transfer.protocol.messages import (
    TRANSFER_PROTOCOL_MAX,
    TRANSFER_PROTOCOL_MIN,
    Challenge,
    Hello,
    Introduction,
    Mac,
    Message,
    Offer,
    Prove,
    Refused,
    Transcript,
    Welcome,
    mac_of,
)
from kv_transfer.protocol.plan import PeerTerms, terms_between

_CHALLENGE = "acceptor's challenge"
_PROVE = "dialer's proof"
_WELCOME = "acceptor's welcome"
_DIALER_REFUSES = "dialer's refusal"
_ACCEPTOR_REFUSES = "acceptor's refusal"
_WORKERS = frozenset(Role) - {Role.ROUTER}
# Kinds that are believed of a refusal without a proof: there will be no link. Any other kind could end a request.
_UNPROVED_KINDS = frozenset({ErrorKind.UNAUTHENTICATED, ErrorKind.INCOMPATIBLE})


@dataclass(frozen=True)
class LocalIdentity:
    """This worker, as it introduces itself.

    transports: the names that it can read over, best first. offers: returns what it lends over now. digest: returns the
    algorithm by which it announces blocks now.
    """

    settings: LinkSettings
    side: Side
    model_fingerprint: str
    transports: tuple[str, ...]
    offers: Callable[[], list[Offer]]
    digest: Callable[[], str] = lambda: XXH3_64


@dataclass(frozen=True)
class PeerTarget:
    """The peer that a dialer asks for: one incarnation of a worker at an address."""

    worker_id: str
    boot_id: str
    address: str


@dataclass(frozen=True)
class Session:
    """A link that is up.

    timeout_seconds: of the peer, for this worker's silence. offers: the dialer's choice, never empty for it.
    token: the key of this session's proofs, on data connections too; derived on both sides, never sent. terms: how the
    dialer converts the peer's KV into its own; None where nothing differs. digest: by which the acceptor announces blocks.
    block_bytes: of the acceptor's blocks.
    """

    worker_id: str
    boot_id: str
    role: str
    timeout_seconds: float
    offers: tuple[Offer, ...]
    token: str
    terms: PeerTerms | None = None
    digest: str = XXH3_64
    block_bytes: int = 0


class Dialing:
    """The dialer's half. ``session`` is set once the acceptor's ``Welcome`` was accepted."""

    def __init__(self, me: LocalIdentity, target: PeerTarget, mac: Mac = mac_of) -> None:
        self.target = target
        self.session: Session | None = None
        self._me = me
        self._where = f"worker {target.worker_id} at {target.address}"
        self._transcript = Transcript(me.settings.secret, mac)
        self._challenge: Challenge | None = None
        self._hello = Hello(*_introduction(me.settings), target.worker_id, target.boot_id)

    def begin(self) -> list[Message]:
        """Return the first messages to send. Called once."""
        self._transcript.add(self._hello)
        return [self._hello]

    def receive(self, message: Message) -> list[Message]:
        """Return the answer to the acceptor. Raises the error that the handshake fails with."""
        match message:
            case Refused() if self.session is None:
                is_proved = self._transcript.is_proved(_ACCEPTOR_REFUSES, message)
                raise _refusal(message, is_proved, f"{self._where} refused the control link")
            case Challenge() if self._challenge is None:
                return [self._prove(message)]
            case Welcome() if self._challenge is not None and self.session is None:
                self.session = self._open(self._challenge, message)
                return []
        raise UnauthenticatedError(
            f"{self._where} sent {type(message).__name__} in the middle of the handshake"
        )

    @property
    def has_begun(self) -> bool:
        """True if the acceptor has proved itself."""
        return self._challenge is not None

    def refusal(self, error: KvbatonError) -> Refused:
        """Return the last message to an acceptor that is given up."""
        return self._transcript.proved(_DIALER_REFUSES, Refused(error.kind, error.message))

    def _prove(self, challenge: Challenge) -> Prove:
        _common_protocol(challenge, self._where)
        if not self._transcript.is_proved(_CHALLENGE, challenge):
            raise UnauthenticatedError(f"{self._where} does not hold this cluster's secret")
        _check_names(challenge, self._where)
        self._check_target(challenge)
        self._transcript.add(challenge)
        self._challenge = challenge
        me = self._me
        timeout = me.settings.peer_timeout_seconds
        unproved = Prove(
            "",
            me.model_fingerprint,
            me.side.layout,
            list(me.transports),
            timeout,
            me.side.num_ranks,
            DIGESTS,
            _copied_heads(me.side),
            _groups(me.side),
            _states(me.side),
        )
        return self._transcript.proved(_PROVE, unproved)

    def _check_target(self, found: Challenge) -> None:
        """Raise WorkerLostError if another worker, or another incarnation, answers at the address."""
        target = self.target
        if (found.worker_id, found.boot_id) != (target.worker_id, target.boot_id):
            raise WorkerLostError(
                f"{self._where} was asked for as boot {target.boot_id}; boot {found.boot_id} of worker"
                f" {found.worker_id} answers there: the one that was asked for is gone"
            )

    def _open(self, challenge: Challenge, welcome: Welcome) -> Session:
        me = self._me
        if not self._transcript.is_proved(_WELCOME, welcome):
            raise UnauthenticatedError(f"{self._where} sent a last message that is not of this session")
        if welcome.protocol != _common_protocol(challenge, self._where):
            raise IncompatiblePeerError(f"{self._where} chose transfer protocol {welcome.protocol}")
        _check_timeout(welcome, self._where)
        lent = [offer.transport for offer in welcome.offers]
        _agree(me, welcome, me.transports, lent, self._where, _why_no_digest(welcome.digest, DIGESTS))
        _check_addresses(welcome, self._where)
        self._transcript.add(welcome)
        return Session(
            challenge.worker_id,
            challenge.boot_id,
            challenge.role,
            welcome.timeout_seconds,
            tuple(welcome.offers),
            self._transcript.token(),
            terms_between(
                me.side, me.model_fingerprint, _side(welcome, self._where), welcome.model_fingerprint
            ),
            welcome.digest,
            welcome.layout.block_bytes,
        )


class Accepting:
    """The acceptor's half. ``session`` is set once the dialer's proof was accepted."""

    def __init__(self, me: LocalIdentity, mac: Mac = mac_of) -> None:
        self.session: Session | None = None
        self._me = me
        self._transcript = Transcript(me.settings.secret, mac)
        self._hello: Hello | None = None

    def begin(self) -> list[Message]:
        """Return nothing: the dialer sends first."""
        return []

    def receive(self, message: Message) -> list[Message]:
        """Return the answer to the dialer. Raises the error that the dialer is refused with."""
        match message:
            case Refused() if self.session is None:
                is_proved = self._transcript.is_proved(_DIALER_REFUSES, message)
                raise _refusal(message, is_proved, "the dialing worker gave up")
            case Hello() if self._hello is None:
                _check_names(message, "the dialing worker")
                _common_protocol(message, f"worker {message.worker_id}")
                self._hello = message
                self._transcript.add(message)
                challenge = Challenge(*_introduction(self._me.settings), proof="")
                return [self._transcript.proved(_CHALLENGE, challenge)]
            case Prove() if self._hello is not None and self.session is None:
                return [self._welcome_for(message, self._hello)]
        raise UnauthenticatedError(f"{type(message).__name__} came in the middle of the handshake")

    @property
    def has_begun(self) -> bool:
        """True if the dialer has introduced itself."""
        return self._hello is not None

    def refusal(self, error: KvbatonError) -> Refused:
        """Return the last message to a dialer that is refused."""
        return self._transcript.proved(_ACCEPTOR_REFUSES, Refused(error.kind, error.message))

    def _welcome_for(self, prove: Prove, hello: Hello) -> Welcome:
        me = self._me
        who = f"worker {hello.worker_id}"
        # First of all: a process without the secret learns nothing about this worker.
        if not self._transcript.is_proved(_PROVE, prove):
            raise UnauthenticatedError(f"{who} does not hold this cluster's secret")
        if (hello.target_worker_id, hello.target_boot_id) != (me.settings.worker_id, me.settings.boot_id):
            raise WorkerLostError(
                f"{who} asked for boot {shown(hello.target_boot_id)} of worker {shown(hello.target_worker_id)};"
                f" this is boot {me.settings.boot_id} of worker {me.settings.worker_id}"
            )
        _check_timeout(prove, who)
        offers = me.offers()
        digest = me.digest()
        lent = [offer.transport for offer in offers]
        _agree(me, prove, lent, prove.transports, who, _why_no_digest(digest, prove.digests))
        self._transcript.add(prove)
        protocol = _common_protocol(hello, who)
        timeout = me.settings.peer_timeout_seconds
        unproved = Welcome(
            protocol,
            me.model_fingerprint,
            me.side.layout,
            offers,
            timeout,
            me.side.num_ranks,
            digest,
            num_kv_heads=_copied_heads(me.side),
            groups=_groups(me.side),
            states=_states(me.side),
        )
        welcome = self._transcript.proved(_WELCOME, unproved)
        self.session = Session(
            hello.worker_id, hello.boot_id, hello.role, prove.timeout_seconds, (), self._transcript.token()
        )
        return welcome


def _introduction(me: LinkSettings) -> tuple[int, int, str, str, str, str]:
    """Return the fields of ``Introduction``, with a fresh nonce."""
    nonce = secrets.token_hex(16)
    return TRANSFER_PROTOCOL_MIN, TRANSFER_PROTOCOL_MAX, nonce, me.worker_id, me.boot_id, str(me.role)


def _copied_heads(side: Side) -> int | UnsetType:
    return side.num_kv_heads if side.has_copies else UNSET


def _groups(side: Side) -> tuple[CacheGroup, ...] | UnsetType:
    return side.layers if isinstance(side, GroupedSide) else UNSET


def _states(side: Side) -> StateLayout | UnsetType:
    return side.states or UNSET if isinstance(side, GroupedSide) else UNSET


def _side(of: Prove | Welcome, who: str) -> Side:
    """Return the peer's side. Raises IncompatiblePeerError for heads that its ranks do not hold."""
    try:
        num_kv_heads = 0 if of.num_kv_heads is UNSET else of.num_kv_heads
        if of.groups is UNSET:
            return Side(of.layout, of.num_ranks, num_kv_heads)
        states = None if of.states is UNSET else of.states
        return GroupedSide.of(of.groups, of.num_ranks, num_kv_heads, states)
    except ValueError as error:
        raise IncompatiblePeerError(f"{who} describes its KV wrongly: {error}") from error


def _refusal(message: Refused, is_proved: bool, what: str) -> KvbatonError:
    """Return the error of a refusal; without a proof it means no more than that there is no link."""
    is_believed = is_proved or message.kind in _UNPROVED_KINDS
    kind = message.kind if is_believed else ErrorKind.UNAUTHENTICATED
    return error_from_kind(kind, f"{what}: {shown(message.message)}")


def _check_names(peer: Introduction, who: str) -> None:
    """Raise UnauthenticatedError for an invalid id, or a role that no worker has."""
    for field in ("worker_id", "boot_id"):
        if why := why_no_name(getattr(peer, field)):
            raise UnauthenticatedError(f"{who} has an invalid {field}: {why}")
    if peer.role not in _WORKERS:
        raise UnauthenticatedError(
            f"{who} has role {shown(peer.role, 20)}; workers are {', '.join(sorted(_WORKERS))}"
        )


def _check_timeout(peer: Prove | Welcome, who: str) -> None:
    if not (math.isfinite(peer.timeout_seconds) and peer.timeout_seconds > 0):
        raise IncompatiblePeerError(
            f"{who} has timeout_seconds {peer.timeout_seconds}; it must be finite and above 0"
        )


def _common_protocol(peer: Introduction, who: str) -> int:
    if peer.protocol_min > TRANSFER_PROTOCOL_MAX or peer.protocol_max < TRANSFER_PROTOCOL_MIN:
        raise IncompatiblePeerError(
            f"{who} speaks transfer protocol {peer.protocol_min}..{peer.protocol_max};"
            f" this worker speaks {TRANSFER_PROTOCOL_MIN}..{TRANSFER_PROTOCOL_MAX}"
        )
    return min(TRANSFER_PROTOCOL_MAX, peer.protocol_max)


def _agree(
    me: LocalIdentity,
    peer: Prove | Welcome,
    ours: Sequence[str],
    theirs: Sequence[str],
    who: str,
    why_no_digest: str | None,
) -> None:
    """Raise IncompatiblePeerError that names everything that differs and cannot be converted.

    ours, theirs: transports, of which one in common is enough. Both sides come to the same answer.
    """
    differences = me.side.differences(_side(peer, who))
    if weights_of(me.model_fingerprint) != weights_of(peer.model_fingerprint):
        differences.append(
            f"model_fingerprint: ours is {me.model_fingerprint}, the peer's is {peer.model_fingerprint}"
        )
    if not set(ours) & set(theirs):
        differences.append(f"transport: ours is {_listed(ours)}, the peer's is {_listed(theirs)}")
    if why_no_digest:
        differences.append(why_no_digest)
    if differences:
        raise IncompatiblePeerError(f"{who} cannot hand KV over to this one: {'; '.join(differences)}")


def _why_no_digest(announced: str, verified: Sequence[str]) -> str | None:
    if announced in verified:
        return None
    return f"digest: blocks are announced by {shown(announced)}, and verified by {shown(_listed(verified))}"


def _check_addresses(welcome: Welcome, who: str) -> None:
    for offer in welcome.offers:
        num_addresses = 1 + len(offer.other_addresses)
        if num_addresses != welcome.num_ranks:
            raise IncompatiblePeerError(
                f"{who} offers {offer.transport} at {num_addresses} addresses; it has {welcome.num_ranks} ranks"
            )


def _listed(names: Sequence[str]) -> str:
    return " or ".join(names) or "none"
