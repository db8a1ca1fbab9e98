"""What the control half's process and the ranks say to each other on their lines: tagged msgpack maps, one per frame.

A job is a read or a commit; its number is the control half's, and the same on every rank.
"""

from typing import Any

import msgspec

from contract.errors import InternalError
from kv_transfer.protocol import events as ev
from kv_transfer.protocol.digests import Share
from kv_transfer.protocol.messages import Offer
from kv_transfer.protocol.orders import Conversion, PullJob
from kv_transfer.protocol.reads import LeaseName, RangeGrant, Read, Source


class RankSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank's half is opened with; see ``TransferSettings``. boot_id: of this rank's transports."""

    rank: int
    num_ranks: int
    boot_id: str
    host: str
    advertise_host: str | None
    data_port: int
    transport: str
    read_timeout_seconds: float
    max_staging_bytes: int
    shm_dir: str | None


class Word(msgspec.Struct, frozen=True, tag=True):
    """The root of everything on a line."""


# To a rank.


class Pull(Word, frozen=True):
    """A ``PullJob``, cut to what this rank reads."""

    number: int
    source: Source
    name: LeaseName
    first_block: int
    block_ids: tuple[int, ...]
    digests: tuple[int, ...]
    seeds: tuple[int, ...]
    conversion: Conversion | None
    grants: tuple[RangeGrant, ...]
    others: tuple[Share, ...]
    rank: int

    @classmethod
    def of(cls, number: int, job: PullJob) -> "Pull":
        """The words for a job. Raises InternalError for a read of a part, which no sender of several ranks offers."""
        if job.part is not None:
            raise InternalError(f"a part of the blocks of {job.key} would be read whole")
        return cls(
            number=number,
            source=job.source,
            name=job.name,
            first_block=job.first_block,
            block_ids=job.block_ids,
            digests=job.digests,
            seeds=job.seeds,
            conversion=job.conversion,
            grants=job.grants,
            others=job.others,
            rank=job.rank,
        )

    def job(self, read: Read) -> PullJob:
        """The job, named by its number."""
        return PullJob(
            key=str(self.number),
            source=self.source,
            name=self.name,
            first_block=self.first_block,
            block_ids=self.block_ids,
            digests=self.digests,
            seeds=self.seeds,
            read=read,
            conversion=self.conversion,
            grants=self.grants,
            others=self.others,
            rank=self.rank,
        )


class Commit(Word, frozen=True):
    """A ``CommitJob``."""

    number: int
    block_ids: tuple[int, ...]


class Stop(Word, frozen=True):
    """Make this job (or trial) terminal soon. One that is over is left alone."""

    number: int


class Leave(Word, frozen=True):
    """The link of this source is gone."""

    source: Source


class Release(Word, frozen=True):
    """End this lease; answered by one ``LeaseIdle``."""

    name: LeaseName


class BeginSession(Word, frozen=True):
    """Let in whoever shows this token; answered by ``SessionBegun``."""

    token: str


class EndSession(Word, frozen=True):
    """The link is gone."""

    token: str


class TryPeer(Word, frozen=True):
    """Find out whether this source can be read; answered by ``Tried``."""

    number: int
    source: Source


class ShowProgress(Word, frozen=True):
    """Have the threads that work count once more; answered by ``Progress``."""


ToRank = Pull | Commit | Stop | Leave | Release | BeginSession | EndSession | TryPeer | ShowProgress

# From a rank.


class Opened(Word, frozen=True):
    """The transports are open and the pool is known to them. readers: what can be read over, best first.

    probing: those of them that have to be tried.
    """

    offers: list[Offer]
    readers: list[str]
    probing: list[str]


class RangeIsReady(Word, frozen=True):
    """See ``events.RangeReady``; of this rank alone."""

    key: str
    range: ev.BlockRange


class RangeHasFailed(Word, frozen=True):
    """See ``events.RangeFailed``."""

    key: str
    range: ev.RangeFailed


class Landed(Word, frozen=True):
    """A piece of a read is in place; the job goes on."""

    number: int
    piece: ev.PieceLanded


class Verified(Word, frozen=True):
    """The job is terminal: a read, and every digest matched."""

    number: int
    piece: ev.PieceVerified


class Failed(Word, frozen=True):
    """The job is terminal, without success."""

    number: int
    failure: ev.JobFailed


class Stopped(Word, frozen=True):
    """The job is terminal, because it was told to."""

    number: int


class Committed(Word, frozen=True):
    """The job is terminal: a commit."""

    number: int


class LeaseIdle(Word, frozen=True):
    """No thread of this rank's transports reads the lease any more."""

    name: LeaseName


class SessionBegun(Word, frozen=True):
    """Who shows this token is let in."""

    token: str


class Tried(Word, frozen=True):
    """The outcome of ``TryPeer``: why not, or None."""

    number: int
    why_not: str | None


class Counted(Word, frozen=True):
    """What was added to this rank's counters since the last time, by their full names."""

    added: dict[str, float]


class Progress(Word, frozen=True):
    """What the threads of this rank that work have counted; see ``ShowsProgress``."""

    counts: dict[str, int]


class ThreadFailed(Word, frozen=True):
    """A thread has ended by a bug."""

    thread: str
    error: str


JobOver = Verified | Failed | Stopped | Committed
FromRank = (
    Opened
    | RangeIsReady
    | RangeHasFailed
    | Landed
    | JobOver
    | LeaseIdle
    | SessionBegun
    | Tried
    | Counted
    | Progress
    | ThreadFailed
)

MAX_LINE_FRAME_BYTES = 2**28
"""Both ends are ours: a longer frame is a bug."""
to_rank: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToRank)
from_rank: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromRank)


def over_of(number: int, event: ev.FetchEvent) -> JobOver | Landed:
    """The words for what happened to a job."""
    match event:
        case ev.PieceLanded():
            return Landed(number, event)
        case ev.PieceVerified():
            return Verified(number, event)
        case ev.JobFailed():
            return Failed(number, event)
        case ev.JobStopped():
            return Stopped(number)
        case ev.CommitDone():
            return Committed(number)
    raise InternalError(f"a job cannot say {type(event).__name__}")


def event_of(word: JobOver | Landed) -> ev.FetchEvent:
    """The opposite of ``over_of``."""
    match word:
        case Landed() | Verified():
            return word.piece
        case Failed():
            return word.failure
        case Stopped():
            return ev.JobStopped()
        case Committed():
            return ev.CommitDone()
