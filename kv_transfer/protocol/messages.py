"""What two workers say on their control link: tagged msgpack maps, one per frame.

The dialer speaks first: Hello → Challenge → Prove → Welcome (or Refused, and the link closes). From the Challenge on,
each carries a proof over all that both sides have said so far, itself included (``handshake``). Afterwards the dialer
(which fetches) sends FetchBlocks, ReleaseLease, CancelFetch, the acceptor (which lends) PromptStarted, LayersReadable,
BlocksPublished, TransferComplete, TransferFailed, and both send Ping.
"""

from typing import Annotated, Any

import msgspec

from contract.decoding import decode_outside
from contract.errors import TransferError
from contract.layout import KVLayout, Side
from engine.connector import FirstToken
from kv_transfer.protocol.reads import RangeGrant

PROTOCOL_MIN = 8
"""Proofs up to version 7 could be forged: such a peer is refused by name."""
PROTOCOL_MAX = 8
MAX_HANDSHAKE_BYTES = 65536
NumRanks = Annotated[int, msgspec.Meta(ge=1)]


class Message(msgspec.Struct, frozen=True, tag_field="type"):
    """The root of everything on a control link."""


class Hello(Message, frozen=True, tag="hello"):
    """Who dials whom, and a nonce for the acceptor to prove itself over.

    target_worker_id, target_boot_id: empty from peers of a version that is refused anyway.
    """

    protocol_min: int
    protocol_max: int
    nonce: str
    worker_id: str
    boot_id: str
    role: str
    target_worker_id: str = ""
    target_boot_id: str = ""


class Challenge(Message, frozen=True, tag="challenge"):
    """Who was dialed, its proof over both hellos, and a nonce for the dialer."""

    protocol_min: int
    protocol_max: int
    nonce: str
    worker_id: str
    boot_id: str
    role: str
    proof: str


class Offer(msgspec.Struct, frozen=True):
    """A transport over which a worker lends its blocks, and where. other_addresses: of its ranks from 1 on."""

    transport: str
    address: str
    other_addresses: tuple[str, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Of how many ranks it says where."""
        return 1 + len(self.other_addresses)


class Prove(Message, frozen=True, tag="prove"):
    """The dialer's proof, and what both must agree on.

    layout: of one rank. transports: what it can read over, best first. timeout_seconds: silence that it takes for death.
    """

    proof: str
    model_fingerprint: str
    layout: KVLayout
    transports: list[str]
    timeout_seconds: float
    num_ranks: NumRanks = 1

    @property
    def side(self) -> Side:
        """How the dialer keeps its KV."""
        return Side(self.layout, self.num_ranks)


class Welcome(Message, frozen=True, tag="welcome"):
    """The link is up. protocol: the version to speak. offers: where the blocks are read, best first."""

    protocol: int
    model_fingerprint: str
    layout: KVLayout
    offers: list[Offer]
    timeout_seconds: float
    num_ranks: NumRanks = 1
    proof: str = ""

    @property
    def side(self) -> Side:
        """How the acceptor keeps its KV."""
        return Side(self.layout, self.num_ranks)


class Refused(Message, frozen=True, tag="refused"):
    """The link will not come up; ``kind`` is an ErrorKind value. proof: empty from a side that cannot make one yet."""

    kind: str
    message: str
    proof: str = ""


class Ping(Message, frozen=True, tag="ping"):
    """I live. Renews the leases of whoever sends it."""


class FetchBlocks(Message, frozen=True, tag="fetch"):
    """Announce this transfer's blocks to me, from ``from_block`` on."""

    transfer_id: str
    attempt: int
    from_block: int = 0


class BlocksPublished(Message, frozen=True, tag="published"):
    """These blocks can be read under ``lease``. digests: xxh3_64 per block, seeded with its canonical hash.

    grants: see ``RangeGrant``; of the ranges that the blocks are in, where a transport hands out any. other_digests: as
    ``digests``, which are rank 0's, of the sender's ranks from 1 on.
    """

    transfer_id: str
    attempt: int
    lease: str
    first_block: int
    digests: list[int]
    grants: list[RangeGrant] = []
    other_digests: list[list[int]] = []


class PromptStarted(Message, frozen=True, tag="started"):
    """The prompt is being computed, into blocks that will be lent under ``lease``: time to have room for it."""

    transfer_id: str
    attempt: int
    lease: str


class LayersReadable(Message, frozen=True, tag="layers"):
    """The first ``num_bytes`` bytes of these blocks can be read under ``lease``; their digests follow when they are whole.

    To read them now only saves time. grants: as in ``BlocksPublished``.
    """

    transfer_id: str
    attempt: int
    lease: str
    first_block: int
    num_blocks: Annotated[int, msgspec.Meta(ge=1)]
    num_bytes: Annotated[int, msgspec.Meta(ge=1)]
    grants: list[RangeGrant] = []


class EndExpected(Message, frozen=True, tag="due"):
    """The prompt's last blocks are being computed: the transfer will be complete in about so many seconds.

    A guess, of use to a receiver that can choose when to begin a step.
    """

    transfer_id: str
    attempt: int
    lease: str
    seconds: Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class TransferComplete(Message, frozen=True, tag="complete"):
    """Everything is published; token 0 of every choice."""

    transfer_id: str
    attempt: int
    num_blocks: int
    first_tokens: list[FirstToken]


class TransferFailed(Message, frozen=True, tag="failed"):
    """There is nothing (more) to fetch; ``kind`` is an ErrorKind value or "not_needed"."""

    transfer_id: str
    attempt: int
    kind: str
    message: str


class ReleaseLease(Message, frozen=True, tag="release"):
    """Everything is verified: the blocks are yours again."""

    transfer_id: str
    attempt: int


class CancelFetch(Message, frozen=True, tag="cancel"):
    """I want nothing (more) of this transfer."""

    transfer_id: str
    attempt: int


SenderWord = (
    PromptStarted | LayersReadable | EndExpected | BlocksPublished | TransferComplete | TransferFailed
)
TransferMessage = FetchBlocks | SenderWord | ReleaseLease | CancelFetch
AnyMessage = Hello | Challenge | Prove | Welcome | Refused | Ping | TransferMessage

_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyMessage)


def decode_message(frame: bytes) -> Message:
    """Raises TransferError for anything but a well-formed message of this protocol."""
    message: Message = decode_outside(
        _decoder.decode, frame, lambda why: TransferError(f"the peer sent a malformed message: {why}")
    )
    return message
