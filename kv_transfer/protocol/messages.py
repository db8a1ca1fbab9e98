"""The messages on a control link: tagged msgpack maps, one per frame.

The dialer begins: ``Hello`` → ``Challenge`` → ``Prove`` → ``Welcome`` (or ``Refused``, and the link closes). From the
challenge on, each carries a proof (``Transcript``). Afterwards the dialer (which fetches) sends ``ReceiverMessage``, the
acceptor (which lends) ``SenderMessage``, and both send ``Ping``.
"""

import hmac
from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from contract.cache_layout import CacheGroup
from contract.decoding import Count, Positive, Unsigned, decode_outside, msgpack_decoder
from contract.errors import TransferError
from contract.layout import KVLayout
from contract.options import MAX_SECONDS
from contract.proofs import derive_key, make_proof
from contract.state_layout import StateLayout
from engine.connector import FirstToken
from kv_transfer.protocol.digests import XXH3_64
from kv_transfer.protocol.reads import RangeGrant

# Proofs up to version 7 could be forged, and version 8 names no digest: such a peer is refused with its version.
TRANSFER_PROTOCOL_MIN = 9
TRANSFER_PROTOCOL_MAX = 9
MAX_HANDSHAKE_BYTES = 65536
Groups = Annotated[tuple[CacheGroup, ...], msgspec.Meta(min_length=1)]
Timeout = Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)]
# At most 0, but for rounding.
_MOST_LOGPROB = 1e-3


class Message(msgspec.Struct, frozen=True, tag_field="type"):
    """The root of all messages."""


class Introduction(Message, frozen=True):
    """The protocol versions and the identity of a worker, and a nonce for the other one's proof."""

    protocol_min: Count
    protocol_max: Count
    nonce: str
    worker_id: str
    boot_id: str
    role: str


class Hello(Introduction, frozen=True, tag="hello"):
    """The dialer's introduction, and the worker that it dials.

    target_worker_id, target_boot_id: empty from peers of a version that is refused anyway.
    """

    target_worker_id: str = ""
    target_boot_id: str = ""


class Challenge(Introduction, frozen=True, tag="challenge"):
    """The acceptor's introduction and proof."""

    proof: str


class Offer(msgspec.Struct, frozen=True):
    """A transport over which a worker lends its blocks, and its address. other_addresses: of its ranks from 1 on."""

    transport: str
    address: str
    other_addresses: tuple[str, ...] = ()


class Prove(Message, frozen=True, tag="prove"):
    """The dialer's proof, and what both must agree on.

    layout: of one rank. transports: those that it can read over, best first. timeout_seconds: after so long a silence the
    peer is dead. digests: the algorithms that it can verify blocks by. num_kv_heads: of the model, if ranks hold the same
    ones; else it is not sent, and proofs are those of peers without the field. groups: of layers, if not each layer keeps
    all tokens; ``layout`` is the first one's then. states: of recurrent layers, if there are any; then groups are sent, too.
    """

    proof: str
    model_fingerprint: str
    layout: KVLayout
    transports: list[str]
    timeout_seconds: Timeout
    num_ranks: Positive = 1
    digests: tuple[str, ...] = (XXH3_64,)
    num_kv_heads: Positive | UnsetType = UNSET
    groups: Groups | UnsetType = UNSET
    states: StateLayout | UnsetType = UNSET


class Welcome(Message, frozen=True, tag="welcome"):
    """The link is up. protocol: the version that both use. offers: where the blocks are read, best first.

    digest: the algorithm by which blocks are announced. num_kv_heads, groups, states: see ``Prove``.
    """

    protocol: Count
    model_fingerprint: str
    layout: KVLayout
    offers: list[Offer]
    timeout_seconds: Timeout
    num_ranks: Positive = 1
    digest: str = XXH3_64
    proof: str = ""
    num_kv_heads: Positive | UnsetType = UNSET
    groups: Groups | UnsetType = UNSET
    states: StateLayout | UnsetType = UNSET


class Refused(Message, frozen=True, tag="refused"):
    """The link is refused. kind: an ErrorKind value. proof: empty from a side that cannot make one yet."""

    kind: str
    message: str
    proof: str = ""


class Ping(Message, frozen=True, tag="ping"):
    """The sender of this is alive: its leases are renewed."""


class TransferMessage(Message, frozen=True):
    """The root of messages about one transfer."""

    transfer_id: str
    attempt: Unsigned


class LeaseMessage(TransferMessage, frozen=True):
    """The root of messages about blocks that are lent under ``lease``."""

    lease: str


class FetchBlocks(TransferMessage, frozen=True, tag="fetch"):
    """Ask for this transfer's blocks to be announced, from ``from_block`` on."""

    from_block: Count = 0


class BlocksPublished(LeaseMessage, frozen=True, tag="published"):
    """These blocks can be read. digests: of each block, seeded with the block's hash; of rank 0.

    grants: see ``RangeGrant``; of the ranges that the blocks are in, where a transport hands out any.
    other_digests: of the sender's ranks from 1 on.
    """

    first_block: Count
    digests: list[Unsigned]
    grants: list[RangeGrant] = []
    other_digests: list[list[Unsigned]] = []


class PromptStarted(LeaseMessage, frozen=True, tag="started"):
    """The prompt is being computed: the receiver should reserve blocks for it."""


class LayersReadable(LeaseMessage, frozen=True, tag="layers"):
    """The first ``num_bytes`` bytes of these blocks can be read; their digests follow when they are complete.

    A hint: to read them now only saves time. grants: as in ``BlocksPublished``.
    """

    first_block: Count
    num_blocks: Positive
    num_bytes: Annotated[int, msgspec.Meta(ge=1)]
    grants: list[RangeGrant] = []


class EndExpected(LeaseMessage, frozen=True, tag="due"):
    """The prompt's last blocks are being computed: the transfer will be complete in about so many seconds. A hint."""

    seconds: Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class TransferComplete(TransferMessage, frozen=True, tag="complete"):
    """Everything is published; the first token of every choice."""

    num_blocks: Count
    first_tokens: list[FirstToken]


class TransferFailed(TransferMessage, frozen=True, tag="failed"):
    """Nothing (more) can be fetched. kind: an ErrorKind value or "not_needed"."""

    kind: str
    message: str


class ReleaseLease(TransferMessage, frozen=True, tag="release"):
    """Everything is verified: the receiver does not need the blocks any more."""


class CancelFetch(TransferMessage, frozen=True, tag="cancel"):
    """The receiver needs nothing (more) of this transfer."""


SenderMessage = (
    PromptStarted | LayersReadable | EndExpected | BlocksPublished | TransferComplete | TransferFailed
)
ReceiverMessage = FetchBlocks | ReleaseLease | CancelFetch
AnyMessage = Hello | Challenge | Prove | Welcome | Refused | Ping | SenderMessage | ReceiverMessage

_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgpack_decoder(AnyMessage)


def decode_message(frame: bytes) -> Message:
    """Decode a message. Raises TransferError for anything but a well-formed message of this protocol."""
    message = decode_outside(
        _decoder.decode, frame, lambda why: TransferError(f"the peer sent a malformed message: {why}")
    )
    if isinstance(message, TransferComplete):
        _check_logprobs(message.first_tokens)
    return message


def _check_logprobs(tokens: Sequence[FirstToken]) -> None:
    """Raise TransferError for a log probability that is none. Their type is not only this protocol's, and has no range."""
    for token in tokens:
        values = (token.logprobs.logprob, *token.logprobs.top_logprobs) if token.logprobs else ()
        if not all(value <= _MOST_LOGPROB for value in values):
            raise TransferError(f"the peer sent a malformed message: log probabilities {values}")


Mac = Callable[[bytes, str, Sequence[Message]], str]
"""(key, label, messages) → MAC."""
_P = TypeVar("_P", Challenge, Prove, Welcome, Refused)


def mac_of(key: bytes, label: str, messages: Sequence[Message]) -> str:
    """Compute production's MAC, over all fields of all messages."""
    return make_proof(key, label, *map(msgspec.msgpack.encode, messages))


class Transcript:
    """Owns the messages of one handshake, on one side, and makes and checks the proofs over them.

    Every proof covers every field of every message up to itself, in order, under a label that names its message. So a proof
    is valid in one place of one session only: it cannot be replayed, reflected, moved to another message, or completed with
    other fields. Both sides also derive the session's token from all messages. mac: tests pass weak ones.
    """

    def __init__(self, secret: str, mac: Mac = mac_of) -> None:
        self._key = derive_key(secret, "control link")
        self._mac = mac
        self._messages: list[Message] = []

    def add(self, message: Message) -> None:
        """Cover this message by every later proof."""
        self._messages.append(message)

    def proved(self, label: str, message: _P) -> _P:
        """Return the message with its proof, over all that was added and the rest of it; cover it by every later proof."""
        message = replace(message, proof=self._proof(label, message))
        self.add(message)
        return message

    def is_proved(self, label: str, message: _P) -> bool:
        """Compare the message's proof, in constant time."""
        return hmac.compare_digest(
            self._proof(label, message).encode(), message.proof.encode("utf-8", "replace")
        )

    def token(self) -> str:
        """Derive the session's token, which is never sent on the link."""
        return self._mac(self._key, "session token", self._messages)

    def _proof(self, label: str, message: Challenge | Prove | Welcome | Refused) -> str:
        return self._mac(self._key, label, [*self._messages, replace(message, proof="")])
