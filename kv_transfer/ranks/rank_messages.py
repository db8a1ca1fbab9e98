"""The messages between the control half's process and its ranks: tagged msgpack maps, one in a frame.

A ``PullJob``, cut to a rank's share, and a ``CommitJob`` are sent as they are, but for their ``read``, which stays in its
process. Their keys are those of the group, the same on every rank. A rank answers them with ``JobReport``.
"""

from typing import Any

import msgspec

from contract.errors import InternalError
from kv_transfer.links.framing import as_frame
from kv_transfer.protocol import events as ev
from kv_transfer.protocol.messages import Offer
from kv_transfer.protocol.orders import CommitJob, PullJob
from kv_transfer.protocol.reads import LeaseName, Read, Source

MAX_FRAME_BYTES = 2**28
"""Both ends are ours: a longer frame is a bug."""

JobEvent = ev.PieceLanded | ev.PieceVerified | ev.JobFailed | ev.JobStopped | ev.CommitDone


class RankMessage(msgspec.Struct, frozen=True, tag=True):
    """The root of all messages on a rank's socket but for the jobs."""


# To a rank.


class Stop(RankMessage, frozen=True):
    """Make the job or the probe with this key terminal soon. One that is over is ignored."""

    key: str


class Forget(RankMessage, frozen=True):
    """Close what is open to this source, whose link is gone."""

    source: Source


class Release(RankMessage, frozen=True):
    """End this lease; answered by one ``LeaseIdle``."""

    name: LeaseName


class BeginSession(RankMessage, frozen=True):
    """Serve readers that show this token; answered by an ``Answer`` with the token as its key."""

    token: str


class EndSession(RankMessage, frozen=True):
    """Serve no reader that shows this token: its link is gone."""

    token: str


class Probe(RankMessage, frozen=True):
    """Find out whether this source can be read; answered by an ``Answer``."""

    key: str
    source: Source


class RequestProgress(RankMessage, frozen=True):
    """Report the progress of the threads; answered by ``Progress``."""


ToRank = PullJob | CommitJob | Stop | Forget | Release | BeginSession | EndSession | Probe | RequestProgress

# From a rank.


class Opened(RankMessage, frozen=True):
    """The transports are open and have the pool. readers: transports that can be read over, best first.

    probing: those of them that have to be probed.
    """

    offers: list[Offer]
    readers: list[str]
    probing: list[str]


class RangeReport(RankMessage, frozen=True):
    """This rank has digested and lent a range of a request's blocks, or has failed to."""

    key: str
    event: ev.BlockRange | ev.RangeFailed


class JobReport(RankMessage, frozen=True):
    """A job's blocks have landed on this rank, or the job is terminal there."""

    key: str
    event: JobEvent


class LeaseIdle(RankMessage, frozen=True):
    """No thread of this rank's transports reads the lease any more."""

    name: LeaseName


class Answer(RankMessage, frozen=True):
    """The answer to a ``BeginSession`` or a ``Probe``. error: None for success."""

    key: str
    error: str | None = None


class Counted(RankMessage, frozen=True):
    """Additions to this rank's counters since the last report, by their full names."""

    added: dict[str, float]


class Progress(RankMessage, frozen=True):
    """Counts of what the threads of this rank have done; see ``ShowsProgress``."""

    counts: dict[str, int]


class ThreadFailed(RankMessage, frozen=True):
    """A thread has ended by a bug."""

    thread: str
    error: str


FromRank = Opened | RangeReport | JobReport | LeaseIdle | Answer | Counted | Progress | ThreadFailed


def to_frame(message: ToRank | FromRank) -> bytes:
    """Encode a message. Raises InternalError for one that does not fit into a frame."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise InternalError(f"a message to or from a rank has {len(body)} bytes; limit {MAX_FRAME_BYTES}")
    return as_frame(body)


def _without_read(value: Any) -> None:
    """Leave out a job's ``Read``, which is an object of one process."""
    if not isinstance(value, Read):
        raise TypeError(f"a {type(value).__name__} cannot be sent to a rank")


def _new_read(_: type, __: None) -> Read:
    return Read()


_encoder = msgspec.msgpack.Encoder(enc_hook=_without_read)
to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank, dec_hook=_new_read)
from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
