"""The events of a transfer, and the actions that its rules ask for. Plain data; see ``send_side`` and ``fetch_side``."""

from enum import Enum, StrEnum, auto

import msgspec

from contract.errors import InternalError
from kv_transfer.protocol.reads import BlockPart

NOT_NEEDED = "not_needed"
"""The kind with which a sender abandons a transfer whose answer ended with its first token."""


class ImpossibleEventError(InternalError):
    """An event that no correct caller or peer can cause in this state."""


class EndReason(msgspec.Struct, frozen=True):
    """The reason why a transfer ended unused. kind: an ErrorKind value or NOT_NEEDED."""

    kind: str
    message: str


class RetryStep(StrEnum):
    """A way to read blocks again whose read failed: over another transport of the same link, or over the same one.

    As an order: read in this way from now on; no read is posted at that time.
    """

    OTHER_TRANSPORT = "other_transport"
    SAME_TRANSPORT = "same_transport"


class BlockRange(msgspec.Struct, frozen=True, tag=True):
    """Blocks of a transfer that can be read and verified.

    As an event: the sender's data half has computed, digested and lent them. As an action: announce them to the peer.
    digests: of rank 0, one per block. grants: (transport, bytes), see ``RangeGrant``. others: the same blocks in the ranks
    from 1 on.
    """

    first_block: int
    digests: tuple[int, ...]
    grants: tuple[tuple[str, bytes], ...] = ()
    others: tuple["BlockRange", ...] = ()


class LayerRange(msgspec.Struct, frozen=True):
    """Blocks of which the first ``num_bytes`` bytes can be read. Their digests follow in a ``BlockRange``.

    As an event: the sender's data half lends them. As an action: announce them to the peer.
    """

    first_block: int
    num_blocks: int
    num_bytes: int
    grants: tuple[tuple[str, bytes], ...] = ()


class RangeFailed(msgspec.Struct, frozen=True, tag=True):
    """An ordered range could not be digested."""

    first_block: int
    num_blocks: int
    kind: str
    message: str


class Refuse(msgspec.Struct, frozen=True):
    """Refuse ``peer`` the transfer, or the rest of it."""

    peer: str
    kind: str
    message: str


class PieceLanded(msgspec.Struct, frozen=True, tag=True):
    """All bytes of one posted pull are in place; the job goes on."""

    num_blocks: int
    begin: float
    end: float


class PieceVerified(msgspec.Struct, frozen=True, tag=True):
    """The digests of one posted pull match; the job is terminal."""

    num_blocks: int
    now: float


class JobFailed(msgspec.Struct, frozen=True, tag=True):
    """A posted pull or commit failed; the job is terminal. Pulls end in the order in which they were posted.

    may_heal: another read may succeed. retry_steps: those that are possible here, best first (set by ``FetchTransfers``).
    """

    kind: str
    message: str
    may_heal: bool = False
    retry_steps: tuple[RetryStep, ...] = ()


class ReadAheadOver(msgspec.Struct, frozen=True):
    """A posted read ahead is terminal. copy: (begin, end) of what it copied; None if it failed."""

    copy: tuple[float, float] | None


class JobStopped(msgspec.Struct, frozen=True, tag=True):
    """A posted pull or commit was stopped; the job is terminal."""


class CommitDone(msgspec.Struct, frozen=True, tag=True):
    """The blocks are visible to the device; the job is terminal."""


class PullBlocks(msgspec.Struct, frozen=True):
    """Post a read of the transfer's blocks from ``first_block`` on into ``block_ids``, and verify them.

    part: read only this part of each block, before their digests are announced, and verify nothing.
    """

    first_block: int
    block_ids: tuple[int, ...]
    part: BlockPart | None = None


class CommitBlocks(msgspec.Struct, frozen=True):
    """Post a commit of these blocks."""

    block_ids: tuple[int, ...]


class StopReads(msgspec.Struct, frozen=True):
    """Make every posted job of this fetch terminal soon."""


class SendNotice(Enum):
    """An action of a ``Send`` without data.

    START: announce to the fetching peer that the prompt is being computed. COMPLETE: announce the end of the transfer, with
    the first token of every choice. REVOKE: serve no more reads of this lease; answered by one call of
    ``send_side.on_readers_gone``. SENT: report the key in ``finished_sending``.
    """

    START = auto()
    COMPLETE = auto()
    REVOKE = auto()
    SENT = auto()


class FetchNotice(Enum):
    """A message to the sender, or a report to the scheduler.

    RELEASE: everything is verified. CANCEL: nothing more is needed. PUBLISHED, FAILED, DRAINED: report the event of that
    name, with the ``ending``. RECEIVED: report the key in ``finished_recving``.
    """

    RELEASE = auto()
    CANCEL = auto()
    PUBLISHED = auto()
    FAILED = auto()
    DRAINED = auto()
    RECEIVED = auto()


SendEvent = BlockRange | LayerRange | RangeFailed
"""A report of the sender's data half."""
SendAction = BlockRange | LayerRange | Refuse | SendNotice
FetchEvent = PieceLanded | PieceVerified | JobFailed | JobStopped | ReadAheadOver | CommitDone
"""A report of the receiver's data half. What its scheduler and the sender do are functions of ``fetch_side``."""
FetchOrder = PullBlocks | RetryStep | CommitBlocks | StopReads
"""A call of the receiver's data half."""
FetchAction = FetchOrder | FetchNotice
