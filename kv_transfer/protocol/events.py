"""What can happen to a transfer, and what a transition asks to be done. Plain data; see ``transitions``."""

import msgspec

from engine.connector import FirstToken
from kv_transfer.protocol.states import RetryStep

# What happens to a Send.


class Opened(msgspec.Struct, frozen=True):
    """The scheduler lends the prompt's blocks; a fetch was parked."""

    num_blocks: int
    now: float


class FetchArrived(msgspec.Struct, frozen=True):
    """A receiver asks for the blocks from ``from_block`` on."""

    peer: str
    from_block: int
    now: float


class Ordered(msgspec.Struct, frozen=True):
    """The ranks are ordered to digest the blocks up to ``num_blocks`` after their forward pass."""

    num_blocks: int


class RankRange(msgspec.Struct, frozen=True):
    """What one rank has of a range of blocks. grants: see ``transport.RangeGrant``; (transport, bytes)."""

    digests: tuple[int, ...]
    grants: tuple[tuple[str, bytes], ...] = ()


class RangeReady(msgspec.Struct, frozen=True, tag=True):
    """These blocks are computed, digested and readable: rank 0's digests and grants, and those of the ``others``."""

    first_block: int
    digests: tuple[int, ...]
    grants: tuple[tuple[str, bytes], ...] = ()
    others: tuple[RankRange, ...] = ()


class LayersReady(msgspec.Struct, frozen=True):
    """The first ``num_bytes`` bytes of these blocks are computed and readable; grants: as in ``RangeReady``, said once."""

    first_block: int
    num_blocks: int
    num_bytes: int
    grants: tuple[tuple[str, bytes], ...] = ()


class EndForeseen(msgspec.Struct, frozen=True):
    """The forward pass that computes the last blocks will be over in about so many seconds."""

    seconds: float


class RangeFailed(msgspec.Struct, frozen=True, tag=True):
    """An ordered range could not be digested."""

    first_block: int
    num_blocks: int
    kind: str
    message: str


class SendFinished(msgspec.Struct, frozen=True):
    """The scheduler's ``finish_send``."""

    first_tokens: tuple[FirstToken, ...]
    now: float


class Abandoned(msgspec.Struct, frozen=True):
    """The scheduler's ``abandon_send``."""

    kind: str
    message: str


class LetGo(msgspec.Struct, frozen=True):
    """The receiver needs the blocks no more: RELEASE or CANCEL."""

    peer: str


class PeerGone(msgspec.Struct, frozen=True):
    """The receiver died."""

    peer: str
    message: str


class Heartbeat(msgspec.Struct, frozen=True):
    """The receiver lives."""

    peer: str
    now: float


class Tick(msgspec.Struct, frozen=True):
    """Time passes."""

    now: float


class ReadersGone(msgspec.Struct, frozen=True):
    """The answer to one ``Revoke``: no thread reads the blocks."""


SendEvent = (
    Opened
    | FetchArrived
    | Ordered
    | RangeReady
    | LayersReady
    | EndForeseen
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


class Announce(msgspec.Struct, frozen=True):
    """Tell the fetching peer that these blocks can be read."""

    first_block: int
    digests: tuple[int, ...]


class AnnounceStart(msgspec.Struct, frozen=True):
    """Tell the fetching peer that the prompt is being computed."""


class AnnounceLayers(msgspec.Struct, frozen=True):
    """Tell the peer how far these blocks can be read, ahead of their digests."""

    first_block: int
    num_blocks: int
    num_bytes: int


class AnnounceEnd(msgspec.Struct, frozen=True):
    """Tell the fetching peer in about how many seconds the transfer will be complete."""

    seconds: float


class AnnounceComplete(msgspec.Struct, frozen=True):
    """Tell the fetching peer that all blocks are announced, with token 0 of every choice."""

    first_tokens: tuple[FirstToken, ...]


class Refuse(msgspec.Struct, frozen=True):
    """Tell ``peer`` that it gets nothing (more), and why."""

    peer: str
    kind: str
    message: str


class Revoke(msgspec.Struct, frozen=True):
    """Serve no more reads of this lease; answered by one ``ReadersGone``."""


class ReportSent(msgspec.Struct, frozen=True):
    """The key goes to ``finished_sending``."""


SendAction = (
    Announce | AnnounceStart | AnnounceLayers | AnnounceEnd | AnnounceComplete | Refuse | Revoke | ReportSent
)

# What happens to a Fetch.


class Announced(msgspec.Struct, frozen=True):
    """The sender published these blocks."""

    first_block: int
    digests: tuple[int, ...]
    now: float


class Started(msgspec.Struct, frozen=True):
    """The sender computes the prompt, in blocks that it has: it will publish them without waiting for anybody."""


class AnnouncedLayers(msgspec.Struct, frozen=True):
    """The sender says that the first ``num_bytes`` bytes of these blocks, whose digests will follow, are readable."""

    first_block: int
    num_blocks: int
    num_bytes: int


class Completed(msgspec.Struct, frozen=True):
    """The sender published everything."""

    num_blocks: int
    first_tokens: tuple[FirstToken, ...]


class SenderFailed(msgspec.Struct, frozen=True):
    """The sender says that there is nothing (more) to get, or it is dead."""

    kind: str
    message: str


class Reserved(msgspec.Struct, frozen=True):
    """The scheduler's ``receive_into``."""

    block_ids: tuple[int, ...]
    num_cached: int


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
    """A posted pull or commit ended without success; the job is terminal. Pulls end in the order in which they were posted.

    may_heal: another read may succeed. retry_steps: those that are possible here, best first; ``FetchTransfers`` says which.
    """

    kind: str
    message: str
    may_heal: bool = False
    retry_steps: tuple[RetryStep, ...] = ()


class ReadAheadOver(msgspec.Struct, frozen=True):
    """A posted read ahead is terminal. copy: (begin, end) of what it copied; None: nothing, it failed."""

    copy: tuple[float, float] | None


class JobStopped(msgspec.Struct, frozen=True, tag=True):
    """A posted pull or commit ended because it was told to; the job is terminal."""


class CommitDone(msgspec.Struct, frozen=True, tag=True):
    """The blocks are visible to the device; the job is terminal."""


class Cancelled(msgspec.Struct, frozen=True):
    """The scheduler's ``cancel_fetch``."""


class Acknowledged(msgspec.Struct, frozen=True):
    """The scheduler has taken the last event (or ``take_received``)."""


FetchEvent = (
    Announced
    | Started
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
    | Acknowledged
)

# What a Fetch asks for.


class Pull(msgspec.Struct, frozen=True):
    """Post a read: the transfer's blocks from ``first_block`` into ``block_ids``, then verify."""

    first_block: int
    block_ids: tuple[int, ...]
    digests: tuple[int, ...]


class ReadAhead(msgspec.Struct, frozen=True):
    """Post a read of bytes ``start_byte``..``end_byte`` - 1 of these blocks, which are not announced yet; verify nothing."""

    first_block: int
    block_ids: tuple[int, ...]
    start_byte: int
    end_byte: int


class ReadAgain(msgspec.Struct, frozen=True):
    """A retry begins and no read is posted any more: what is pulled from now on is read by this step."""

    retry_step: RetryStep


class CommitBlocks(msgspec.Struct, frozen=True):
    """Post a commit of these blocks."""

    block_ids: tuple[int, ...]


class StopReads(msgspec.Struct, frozen=True):
    """Make every posted job of this fetch terminal soon."""


class AskRelease(msgspec.Struct, frozen=True):
    """Tell the sender that everything is verified."""


class AskCancel(msgspec.Struct, frozen=True):
    """Tell the sender that nothing of it is wanted."""


class TellPublished(msgspec.Struct, frozen=True):
    """``Published`` to the scheduler."""


class TellFailed(msgspec.Struct, frozen=True):
    """``Failed`` to the scheduler."""

    kind: str
    message: str


class TellDrained(msgspec.Struct, frozen=True):
    """``Drained`` to the scheduler."""


class TellReceived(msgspec.Struct, frozen=True):
    """The key goes to ``finished_recving``."""


FetchOrder = Pull | ReadAhead | ReadAgain | CommitBlocks | StopReads
FetchWord = AskRelease | AskCancel | TellPublished | TellFailed | TellDrained | TellReceived
FetchAction = FetchOrder | FetchWord
