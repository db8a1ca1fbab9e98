"""The events of a transfer, and the actions that its rules ask for. Plain data; see ``send_side`` and ``fetch_side``."""

from enum import StrEnum

import msgspec

from contract.errors import InternalError
from engine.connector import FirstToken

NOT_NEEDED = "not_needed"
"""The kind with which a sender abandons a transfer whose answer ended with its first token."""


class ImpossibleEventError(InternalError):
    """An event that no correct caller or peer can cause in this state."""


class EndReason(msgspec.Struct, frozen=True):
    """The reason why a transfer ended unused. kind: an ErrorKind value or NOT_NEEDED."""

    kind: str
    message: str


class RetryStep(StrEnum):
    """A way to read blocks again whose read failed: over another transport of the same link, or over the same one."""

    OTHER_TRANSPORT = "other_transport"
    SAME_TRANSPORT = "same_transport"

    @property
    def words(self) -> str:
        """The step for log lines."""
        return self.value.replace("_", " ")


class SendEvent(msgspec.Struct, frozen=True):
    """The root of what happens to a ``Send``."""


class SendAction(msgspec.Struct, frozen=True):
    """The root of what a ``Send`` asks for."""


class FetchEvent(msgspec.Struct, frozen=True):
    """The root of what happens to a ``Fetch``."""


class FetchOrder(msgspec.Struct, frozen=True):
    """The root of what a ``Fetch`` asks of this worker's data half."""


class FetchNotice(msgspec.Struct, frozen=True):
    """The root of what a ``Fetch`` sends to the sender or reports to the scheduler."""


FetchAction = FetchOrder | FetchNotice


class BlockRange(SendEvent, SendAction, frozen=True, tag=True):
    """Blocks of a transfer that can be read and verified.

    As an event: the sender's data half has computed, digested and lent them. As an action: announce them to the peer.
    digests: of rank 0, one per block. grants: (transport, bytes), see ``RangeGrant``. others: the same blocks in the ranks
    from 1 on.
    """

    first_block: int
    digests: tuple[int, ...]
    grants: tuple[tuple[str, bytes], ...] = ()
    others: tuple["BlockRange", ...] = ()


class LayerRange(SendEvent, SendAction, FetchEvent, frozen=True):
    """Blocks of which the first ``num_bytes`` bytes can be read. Their digests follow in a ``BlockRange``.

    As an event: the sender's data half lends them, or the receiver learns so. As an action: announce them to the peer.
    """

    first_block: int
    num_blocks: int
    num_bytes: int
    grants: tuple[tuple[str, bytes], ...] = ()


# Events of a Send.


class SendOpened(SendEvent, frozen=True):
    """The scheduler lends the prompt's blocks, for which a fetch was parked."""

    num_blocks: int
    now: float


class FetchArrived(SendEvent, frozen=True):
    """A receiver asks for the blocks from ``from_block`` on."""

    peer: str
    from_block: int
    now: float


class Ordered(SendEvent, frozen=True):
    """The ranks are ordered to digest the blocks up to ``num_blocks`` after their forward pass."""

    num_blocks: int


class RangeFailed(SendEvent, frozen=True, tag=True):
    """An ordered range could not be digested."""

    first_block: int
    num_blocks: int
    kind: str
    message: str


class SendFinished(SendEvent, frozen=True):
    """The scheduler called ``finish_send``."""

    first_tokens: tuple[FirstToken, ...]
    now: float


class Abandoned(SendEvent, frozen=True):
    """The scheduler called ``abandon_send``."""

    kind: str
    message: str


class Released(SendEvent, frozen=True):
    """The receiver does not need the blocks any more."""

    peer: str


class PeerGone(SendEvent, frozen=True):
    """The receiver died."""

    peer: str
    message: str


class Heartbeat(SendEvent, frozen=True):
    """The receiver is alive."""

    peer: str
    now: float


class Tick(SendEvent, frozen=True):
    """Time has passed."""

    now: float


class ReadersGone(SendEvent, frozen=True):
    """The answer to one ``Revoke``: no thread reads the blocks."""


# Actions of a Send.


class AnnounceStart(SendAction, frozen=True):
    """Announce to the fetching peer that the prompt is being computed."""


class AnnounceComplete(SendAction, frozen=True):
    """Announce to the fetching peer the end of the transfer, with the first token of every choice."""

    first_tokens: tuple[FirstToken, ...]


class Refuse(SendAction, frozen=True):
    """Refuse ``peer`` the transfer, or the rest of it."""

    peer: str
    kind: str
    message: str


class Revoke(SendAction, frozen=True):
    """Serve no more reads of this lease; answered by one ``ReadersGone``."""


class ReportSent(SendAction, frozen=True):
    """Report the key in ``finished_sending``."""


# Events of a Fetch.


class Announced(FetchEvent, frozen=True):
    """The sender published these blocks."""

    blocks: BlockRange
    now: float


class Started(FetchEvent, frozen=True):
    """The sender computes the prompt, in blocks that it has: it will publish them without waiting for anything."""


class Completed(FetchEvent, frozen=True):
    """The sender published everything."""

    num_blocks: int
    first_tokens: tuple[FirstToken, ...]


class SenderFailed(FetchEvent, frozen=True):
    """The sender gives up the transfer, or is dead."""

    kind: str
    message: str


class Reserved(FetchEvent, frozen=True):
    """The scheduler called ``receive_into``."""

    block_ids: tuple[int, ...]
    num_cached: int


class PieceLanded(FetchEvent, frozen=True, tag=True):
    """All bytes of one posted pull are in place; the job goes on."""

    num_blocks: int
    begin: float
    end: float


class PieceVerified(FetchEvent, frozen=True, tag=True):
    """The digests of one posted pull match; the job is terminal."""

    num_blocks: int
    now: float


class JobFailed(FetchEvent, frozen=True, tag=True):
    """A posted pull or commit failed; the job is terminal. Pulls end in the order in which they were posted.

    may_heal: another read may succeed. retry_steps: those that are possible here, best first (set by ``FetchTransfers``).
    """

    kind: str
    message: str
    may_heal: bool = False
    retry_steps: tuple[RetryStep, ...] = ()


class ReadAheadOver(FetchEvent, frozen=True):
    """A posted read ahead is terminal. copy: (begin, end) of what it copied; None if it failed."""

    copy: tuple[float, float] | None


class JobStopped(FetchEvent, frozen=True, tag=True):
    """A posted pull or commit was stopped; the job is terminal."""


class CommitDone(FetchEvent, frozen=True, tag=True):
    """The blocks are visible to the device; the job is terminal."""


class Cancelled(FetchEvent, frozen=True):
    """The scheduler called ``cancel_fetch``."""


class Acknowledged(FetchEvent, frozen=True):
    """The scheduler has taken the last event (or called ``take_received``)."""


# Actions of a Fetch.


class PullBlocks(FetchOrder, frozen=True):
    """Post a read of the transfer's blocks from ``first_block`` on into ``block_ids``, and verify them."""

    first_block: int
    block_ids: tuple[int, ...]
    digests: tuple[int, ...]


class ReadAhead(FetchOrder, frozen=True):
    """Post a read of bytes ``start_byte``..``end_byte`` - 1 of these blocks before they are announced; verify nothing."""

    first_block: int
    block_ids: tuple[int, ...]
    start_byte: int
    end_byte: int


class ReadAgain(FetchOrder, frozen=True):
    """Read by this step from now on: a retry begins, and no read is posted any more."""

    retry_step: RetryStep


class CommitBlocks(FetchOrder, frozen=True):
    """Post a commit of these blocks."""

    block_ids: tuple[int, ...]


class StopReads(FetchOrder, frozen=True):
    """Make every posted job of this fetch terminal soon."""


class SendRelease(FetchNotice, frozen=True):
    """Send to the sender that everything is verified."""


class SendCancel(FetchNotice, frozen=True):
    """Send to the sender that nothing more is needed."""


class ReportPublished(FetchNotice, frozen=True):
    """Report ``Published`` to the scheduler."""


class ReportFailed(FetchNotice, frozen=True):
    """Report ``Failed`` to the scheduler."""

    kind: str
    message: str


class ReportDrained(FetchNotice, frozen=True):
    """Report ``Drained`` to the scheduler."""


class ReportReceived(FetchNotice, frozen=True):
    """Report the key in ``finished_recving``."""
