"""The messages between the control half's process and its ranks, and the sockets that carry them.

A message is a tagged msgpack map, one in a frame. Each rank has one end of a pair of stream sockets. When a socket ends, its
rank's process has ended, which the ranks' executor notices by itself.

A ``PullJob``, cut to a rank's share, and a ``CommitJob`` are sent as they are, but for their ``read``, which stays in its
process. Their keys are those of the group, the same on every rank. A rank answers them with ``JobReport``.
"""

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec

from contract.decoding import msgpack_decoder
from contract.errors import InternalError
from kv_transfer.data.threads import JobThread
from kv_transfer.links.framing import FrameBuffer, as_frame
from kv_transfer.protocol import events as ev
from kv_transfer.protocol.digests import XXH3_64
from kv_transfer.protocol.messages import Offer
from kv_transfer.protocol.orders import CommitJob, PullJob
from kv_transfer.protocol.reads import LeaseName, Read, Source

_READ_BYTES = 2**20
# Both ends are ours: a longer frame is a bug.
MAX_FRAME_BYTES = 2**28
_T = TypeVar("_T")

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

    digest: the algorithm by which blocks are announced.
    """

    offers: list[Offer]
    readers: list[str]
    digest: str = XXH3_64


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
    """The answer to a ``BeginSession`` or a ``Probe``.

    error: None for success. bytes_per_second: see ``ProbingReceiver``.
    """

    key: str
    error: str | None = None
    bytes_per_second: float | None = None


class Counted(RankMessage, frozen=True):
    """Additions to this rank's counters since the last report, by their full names."""

    added: dict[str, float]


class Progress(RankMessage, frozen=True):
    """Counts of what the threads of this rank have done; see ``ConnectorPair.progress``."""

    counts: dict[str, int]


class ThreadFailed(RankMessage, frozen=True):
    """A thread has ended because of a bug."""

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


_encoder = msgspec.msgpack.Encoder(enc_hook=_without_read)
to_rank: msgspec.msgpack.Decoder[ToRank] = msgpack_decoder(ToRank, lambda _type, _value: Read())
from_rank: msgspec.msgpack.Decoder[FromRank] = msgpack_decoder(FromRank)


class RankSocket(Generic[_T]):
    """One end of the sockets between the control half and a rank, which it owns with a thread that receives.

    on_message: called with the messages of the other end, in order. on_bug: called with the error that has ended the thread.
    """

    def __init__(
        self,
        sock: socket.socket,
        decoder: msgspec.msgpack.Decoder[_T],
        on_message: Callable[[_T], None],
        on_bug: Callable[[str, BaseException], None],
        name: str,
    ) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._decoder = decoder
        self._on_message = on_message
        self._on_bug = on_bug
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._receive, name=name, daemon=True)

    def start(self) -> None:
        """Begin to receive."""
        self._thread.start()

    def send(self, message: ToRank | FromRank) -> None:
        """Send a message, from any thread; it is dropped if the other process has ended."""
        frame = to_frame(message)
        with self._lock, suppress(OSError):
            self._sock.sendall(frame)

    def shutdown(self) -> None:
        """End the thread, and a ``send`` that blocks, soon."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the thread and close the socket. Idempotent."""
        self.shutdown()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        self._sock.close()

    def _receive(self) -> None:
        try:
            for frame in _frames_of(self._sock):
                self._on_message(self._decoder.decode(frame))
        except Exception as error:  # noqa: BLE001 - the boundary of the thread: the connector must learn of its end
            self._on_bug(self._thread.name, error)


def _frames_of(sock: socket.socket) -> Iterator[bytes]:
    frames = FrameBuffer(MAX_FRAME_BYTES)
    with suppress(OSError):
        while data := sock.recv(_READ_BYTES):
            yield from frames.feed(data)


class RankSockets:
    """Owns the sockets to all ranks, in rank order. Thread-safe.

    What is sent is queued, and a thread for each rank sends it: a rank that hangs holds up no other thread. on_message:
    called with each rank's messages in their order, for one message at a time. on_bug: see ``RankSocket``.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        on_message: Callable[[int, FromRank], None],
        on_bug: Callable[[str, BaseException], None],
    ) -> None:
        self._on_message = on_message
        self._one_at_a_time = threading.Lock()
        self._sockets: list[RankSocket[FromRank]] = []
        self._senders: list[JobThread] = []
        for rank, sock in enumerate(sockets):
            name = f"kv-ranks-{rank}"
            self._sockets.append(RankSocket(sock, from_rank, partial(self._receive, rank), on_bug, name))
            self._senders.append(JobThread(name, partial(on_bug, name)))
        for sender in self._senders:
            sender.start()
        for end in self._sockets:
            end.start()

    def send(self, rank: int, message: ToRank) -> None:
        """Send a message to one rank; it is dropped if the rank's process has ended."""
        self._senders[rank].post(partial(self._sockets[rank].send, message))

    def send_to_all(self, message: ToRank) -> None:
        """Send a message to every rank."""
        for rank in range(len(self._sockets)):
            self.send(rank, message)

    def close(self) -> None:
        """End the threads and close the sockets. Idempotent."""
        for end, sender in zip(self._sockets, self._senders, strict=True):
            end.shutdown()
            sender.post(None)
            sender.join()
            end.close()

    @property
    def unsent_messages(self) -> list[int]:
        """The number of messages that wait to be sent, by rank."""
        return [sender.num_queued for sender in self._senders]

    def _receive(self, rank: int, message: FromRank) -> None:
        with self._one_at_a_time:
            self._on_message(rank, message)
