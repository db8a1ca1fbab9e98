"""What can happen to a transfer, and what a transition asks to be done. Plain data; see ``transitions``."""

from dataclasses import dataclass

from engine.connector import FirstToken
from kv_transfer.states import Rung

# What happens to a Send.


@dataclass(frozen=True)
class Opened:
    """The scheduler lends the prompt's blocks; a fetch was parked."""

    num_blocks: int
    now: float


@dataclass(frozen=True)
class FetchArrived:
    """A receiver asks for the blocks from ``from_block`` on."""

    peer: str
    from_block: int
    now: float


@dataclass(frozen=True)
class Ordered:
    """The ranks are ordered to digest the blocks up to ``num_blocks`` after their forward pass."""

    num_blocks: int


@dataclass(frozen=True)
class RankRange:
    """What one rank has of a range of blocks. grants: see ``transport.RangeGrant``; (transport, bytes)."""

    digests: tuple[int, ...]
    grants: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True)
class RangeReady:
    """These blocks are computed, digested and readable: rank 0's digests and grants, and those of the ``others``."""

    first_block: int
    digests: tuple[int, ...]
    grants: tuple[tuple[str, bytes], ...] = ()
    others: tuple[RankRange, ...] = ()


@dataclass(frozen=True)
class LayersReady:
    """The first ``num_bytes`` bytes of these blocks are computed and readable; grants: as in ``RangeReady``, said once."""

    first_block: int
    num_blocks: int
    num_bytes: int
    grants: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True)
class RangeFailed:
    """An ordered range could not be digested."""

    first_block: int
    num_blocks: int
    kind: str
    message: str


@dataclass(frozen=True)
class SendFinished:
    """The scheduler's ``finish_send``."""

    first_tokens: tuple[FirstToken, ...]
    now: float


@dataclass(frozen=True)
class Abandoned:
    """The scheduler's ``abandon_send``."""

    kind: str
    message: str


@dataclass(frozen=True)
class LetGo:
    """The receiver needs the blocks no more: RELEASE or CANCEL."""

    peer: str


@dataclass(frozen=True)
class PeerGone:
    """The receiver died."""

    peer: str
    message: str


@dataclass(frozen=True)
class Heartbeat:
    """The receiver lives."""

    peer: str
    now: float


@dataclass(frozen=True)
class Tick:
    """Time passes."""

    now: float


@dataclass(frozen=True)
class ReadersGone:
    """The answer to one ``Revoke``: no thread reads the blocks."""


SendEvent = (
    Opened
    | FetchArrived
    | Ordered
    | RangeReady
    | LayersReady
    | RangeFailed
    | SendFinished
    | Abandoned
    | LetGo
    | PeerGone
    | Heartbeat
    | Tick
    | ReadersGone
)

# What a Send asks for.


@dataclass(frozen=True)
class Announce:
    """Tell the fetching peer that these blocks can be read."""

    first_block: int
    digests: tuple[int, ...]


@dataclass(frozen=True)
class AnnounceLayers:
    """Tell the peer how far these blocks can be read, ahead of their digests."""

    first_block: int
    num_blocks: int
    num_bytes: int


@dataclass(frozen=True)
class AnnounceComplete:
    """Tell the fetching peer that all blocks are announced, with token 0 of every choice."""

    first_tokens: tuple[FirstToken, ...]


@dataclass(frozen=True)
class Refuse:
    """Tell ``peer`` that it gets nothing (more), and why."""

    peer: str
    kind: str
    message: str


@dataclass(frozen=True)
class Revoke:
    """Serve no more reads of this lease; answered by one ``ReadersGone``."""


@dataclass(frozen=True)
class ReportSent:
    """The key goes to ``finished_sending``."""


SendAction = Announce | AnnounceLayers | AnnounceComplete | Refuse | Revoke | ReportSent

# What happens to a Fetch.


@dataclass(frozen=True)
class Announced:
    """The sender published these blocks."""

    first_block: int
    digests: tuple[int, ...]
    now: float


@dataclass(frozen=True)
class AnnouncedLayers:
    """The sender says that the first ``num_bytes`` bytes of these blocks, whose digests will follow, are readable."""

    first_block: int
    num_blocks: int
    num_bytes: int


@dataclass(frozen=True)
class Completed:
    """The sender published everything."""

    num_blocks: int
    first_tokens: tuple[FirstToken, ...]


@dataclass(frozen=True)
class SenderFailed:
    """The sender says that there is nothing (more) to get, or it is dead."""

    kind: str
    message: str


@dataclass(frozen=True)
class Reserved:
    """The scheduler's ``receive_into``."""

    block_ids: tuple[int, ...]
    num_cached: int


@dataclass(frozen=True)
class PieceLanded:
    """All bytes of one posted pull are in place; the job goes on."""

    num_blocks: int
    begin: float
    end: float


@dataclass(frozen=True)
class PieceVerified:
    """The digests of one posted pull match; the job is terminal."""

    num_blocks: int
    now: float


@dataclass(frozen=True)
class JobFailed:
    """A posted pull or commit ended without success; the job is terminal. Pulls end in the order in which they were posted.

    may_heal: another read may succeed. rungs: those that can be climbed here, best first; the desk says which.
    """

    kind: str
    message: str
    may_heal: bool = False
    rungs: tuple[Rung, ...] = ()


@dataclass(frozen=True)
class ReadAheadOver:
    """A posted read ahead is terminal. copy: (begin, end) of what it copied; None: nothing, it failed."""

    copy: tuple[float, float] | None


@dataclass(frozen=True)
class JobStopped:
    """A posted pull or commit ended because it was told to; the job is terminal."""


@dataclass(frozen=True)
class CommitDone:
    """The blocks are visible to the device; the job is terminal."""


@dataclass(frozen=True)
class Cancelled:
    """The scheduler's ``cancel_fetch``."""


@dataclass(frozen=True)
class Told:
    """The scheduler has taken the last event (or ``take_received``)."""


FetchEvent = (
    Announced
    | AnnouncedLayers
    | Completed
    | SenderFailed
    | Reserved
    | PieceLanded
    | PieceVerified
    | JobFailed
    | ReadAheadOver
    | JobStopped
    | CommitDone
    | Cancelled
    | Told
)

# What a Fetch asks for.


@dataclass(frozen=True)
class Pull:
    """Post a read: the transfer's blocks from ``first_block`` into ``block_ids``, then verify."""

    first_block: int
    block_ids: tuple[int, ...]
    digests: tuple[int, ...]


@dataclass(frozen=True)
class ReadAhead:
    """Post a read of bytes ``start_byte``..``end_byte`` - 1 of these blocks, which are not announced yet; verify nothing."""

    first_block: int
    block_ids: tuple[int, ...]
    start_byte: int
    end_byte: int


@dataclass(frozen=True)
class ReadAgain:
    """A rung is climbed and no read is posted any more: what is pulled from now on is read by this rung."""

    rung: Rung


@dataclass(frozen=True)
class CommitBlocks:
    """Post a commit of these blocks."""

    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class StopReads:
    """Make every posted job of this fetch terminal soon."""


@dataclass(frozen=True)
class AskRelease:
    """Tell the sender that everything is verified."""


@dataclass(frozen=True)
class AskCancel:
    """Tell the sender that nothing of it is wanted."""


@dataclass(frozen=True)
class TellPublished:
    """``Published`` to the scheduler."""


@dataclass(frozen=True)
class TellFailed:
    """``Failed`` to the scheduler."""

    kind: str
    message: str


@dataclass(frozen=True)
class TellDrained:
    """``Drained`` to the scheduler."""


@dataclass(frozen=True)
class TellReceived:
    """The key goes to ``finished_recving``."""


FetchAction = (
    Pull
    | ReadAhead
    | ReadAgain
    | CommitBlocks
    | StopReads
    | AskRelease
    | AskCancel
    | TellPublished
    | TellFailed
    | TellDrained
    | TellReceived
)
