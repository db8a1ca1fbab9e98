"""What a transfer is, on each side: its states, what can happen to it, and what has to be done then. Plain data.

``transitions`` holds the rules. A prefill side's transfer is a ``Send``, a decode side's a ``Fetch``.
"""

from enum import StrEnum

import msgspec

from contract.errors import InternalError
from engine.connector import FirstToken

NOT_NEEDED = "not_needed"
"""The kind with which a sender abandons a transfer whose answer ended at token 0."""


class ImpossibleEventError(InternalError):
    """An event that no correct caller or peer can cause in this state."""


class SendState(StrEnum):
    """The sender's side. PARKED: a fetch came before the transfer was opened. NOT_NEEDED: abandoned by this side."""

    PARKED = "parked"
    OPEN = "open"
    PUBLISHING = "publishing"
    COMPLETE = "complete"
    RELEASED = "released"
    EXPIRED = "expired"
    NOT_NEEDED = "not_needed"


_SEND_ENDS = frozenset({SendState.RELEASED, SendState.EXPIRED, SendState.NOT_NEEDED})

SEND_EDGES: dict[SendState, frozenset[SendState]] = {
    SendState.PARKED: frozenset({SendState.OPEN, SendState.EXPIRED, SendState.RELEASED}),
    SendState.OPEN: frozenset({SendState.PUBLISHING}) | _SEND_ENDS,
    SendState.PUBLISHING: frozenset({SendState.COMPLETE}) | _SEND_ENDS,
    SendState.COMPLETE: _SEND_ENDS,
    SendState.RELEASED: frozenset(),
    SendState.EXPIRED: frozenset(),
    SendState.NOT_NEEDED: frozenset(),
}


class RetryStep(StrEnum):
    """How blocks whose read failed are read again: over another transport of the same link, or over the same one."""

    OTHER_TRANSPORT = "other_transport"
    SAME_TRANSPORT = "same_transport"

    @property
    def words(self) -> str:
        """For people."""
        return self.value.replace("_", " ")


class FetchState(StrEnum):
    """The receiver's side.

    WAITING: asked, no blocks. RESERVED: blocks, no read posted. MOVING: some bytes are there or on their way. LANDED:
    all bytes are. VERIFIED: all digests match. COMMITTED: the blocks are visible and token 0 is known: the request may run.
    DRAINING: ended, a posted read is not terminal yet. QUARANTINED: it is, but the scheduler has not been told. FREE: the
    blocks are the scheduler's.
    """

    WAITING = "waiting"
    RESERVED = "reserved"
    MOVING = "moving"
    LANDED = "landed"
    VERIFIED = "verified"
    COMMITTED = "committed"
    DRAINING = "draining"
    QUARANTINED = "quarantined"
    FREE = "free"


_FETCH_ABORT = frozenset({FetchState.DRAINING, FetchState.QUARANTINED, FetchState.FREE})

FETCH_EDGES: dict[FetchState, frozenset[FetchState]] = {
    FetchState.WAITING: frozenset({FetchState.RESERVED, FetchState.FREE}),
    FetchState.RESERVED: frozenset(
        {FetchState.MOVING, FetchState.LANDED, FetchState.QUARANTINED, FetchState.FREE}
    ),
    FetchState.MOVING: frozenset({FetchState.LANDED}) | _FETCH_ABORT,
    FetchState.LANDED: frozenset({FetchState.VERIFIED, FetchState.MOVING}) | _FETCH_ABORT,
    FetchState.VERIFIED: frozenset({FetchState.COMMITTED}) | _FETCH_ABORT,
    FetchState.COMMITTED: frozenset({FetchState.FREE}),
    FetchState.DRAINING: frozenset({FetchState.QUARANTINED}),
    FetchState.QUARANTINED: frozenset({FetchState.FREE}),
    FetchState.FREE: frozenset(),
}


class Ending(msgspec.Struct, frozen=True):
    """Why a transfer ended without being used. ``kind`` is an ErrorKind value or NOT_NEEDED."""

    kind: str
    message: str


class Send(msgspec.Struct, frozen=True, kw_only=True):
    """One transfer on the sender's side.

    num_ordered, num_digested: blocks whose digests were ordered, and are done with. digests: those that are known.
    num_revokes: revocations whose last reader is not reported gone yet. deadline: when the lease (or the parked
    fetch) expires, on the local monotonic clock. peer: the boot id that fetches.
    """

    state: SendState
    lease_seconds: float
    num_blocks: int = 0
    is_opened: bool = True
    num_ordered: int = 0
    num_digested: int = 0
    digests: tuple[int, ...] = ()
    first_tokens: tuple[FirstToken, ...] | None = None
    peer: str | None = None
    from_block: int = 0
    deadline: float | None = None
    is_finished: bool = False
    is_reported: bool = False
    num_revokes: int = 0
    ending: Ending | None = None

    @property
    def has_ended(self) -> bool:
        """No block of it is served any more."""
        return self.state in _SEND_ENDS

    @property
    def is_digesting(self) -> bool:
        """The data thread may be reading the blocks."""
        return self.num_ordered > self.num_digested

    @property
    def is_done(self) -> bool:
        """Nothing can follow: forget it."""
        return self.has_ended and (self.is_reported or not self.is_opened)


class Fetch(msgspec.Struct, frozen=True, kw_only=True):
    """One transfer on the receiver's side.

    digests: of the blocks that the sender announced so far. num_pulled: blocks up to here are cached or posted.
    num_posted: jobs given to the data thread that are not terminal. num_verified: blocks behind the cached ones, up to the
    first that is not. copies: (begin, end) of each copy. retry_steps: those that were taken, in order.
    ahead: (first block, bytes) of blocks of which so many bytes were posted before they were announced.
    is_told: the scheduler knows that blocks are needed. is_retrying: a read has failed and another will be tried, once all
    that are posted are terminal. is_visible: its
    verified blocks are, to what runs here.
    """

    num_blocks: int
    state: FetchState = FetchState.WAITING
    digests: tuple[int, ...] = ()
    block_ids: tuple[int, ...] = ()
    is_reserved: bool = False
    num_cached: int = 0
    num_pulled: int = 0
    num_posted: int = 0
    num_landed: int = 0
    num_verified: int = 0
    first_tokens: tuple[FirstToken, ...] | None = None
    announced_at: float = 0.0
    verified_at: float = 0.0
    copies: tuple[tuple[float, float], ...] = ()
    ahead: tuple[tuple[int, int], ...] = ()
    retry_steps: tuple[RetryStep, ...] = ()
    is_told: bool = False
    is_retrying: bool = False
    is_visible: bool = False
    ending: Ending | None = None
    is_cancelled: bool = False

    @property
    def has_ended(self) -> bool:
        """Nothing that the sender says matters any more."""
        return self.state in _FETCH_ABORT

    @property
    def exposed_seconds(self) -> float:
        """Last announcement of the sender → verified."""
        return max(0.0, self.verified_at - self.announced_at)

    @property
    def hidden_seconds(self) -> float:
        """Seconds of copying before the last announcement."""
        return sum(max(0.0, min(end, self.announced_at) - begin) for begin, end in self.copies)

    @property
    def copying_seconds(self) -> float:
        """Seconds of copying, one copy counted like another where they ran beside each other."""
        return sum(end - begin for begin, end in self.copies)
