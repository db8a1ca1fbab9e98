"""The parts of a transport (how the bytes of lent blocks reach another process), and all senders as one."""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pydantic import Field

from engine.connector import KVMemory
from kv_transfer.options import BootSettings, TransferOptions
from kv_transfer.protocol.messages import Offer
from kv_transfer.protocol.reads import LeaseName, Read, ReadRequest, Source
from kv_transfer.transports.leases import Sender, Sessions

AUTO = "auto"


FetchFirst = Callable[[Source, ReadRequest, Sequence[memoryview], Read, Sequence[ReadRequest]], None]
"""(source, request, views, read, following): see ``ReceiverTraits.fetch_first``."""


@dataclass(frozen=True)
class ReceiverTraits:
    """The abilities of a receiver beyond ``ReceiverTransport``. One without any is complete: each has a neutral default.

    fetch_first: does what ``fetch`` does; ``following`` are the requests of the source's next fetches, in order, as far as
    is known, and the receiver may send them ahead. A request that was sent need not be fetched, and nothing of it is
    written before its own fetch. None: each request is sent by its own fetch.
    ask: sends the requests of the source's next fetches, in order, if nothing is in the way. Does not block; called while
    nothing is fetched from the source.
    is_at_hand: returns whether a fetch would only copy memory of this machine: it neither connects to the source nor waits
    for it. The thread that orders a short read then makes it itself.
    is_on_our_device: returns whether the source's pool is on the device of this worker's pool; False if that is not known
    yet. Blocks are then not read layer by layer, since each read would stop the pass that computes there.

    A receiver publishes the record as its attribute ``traits``. One that maps the pools of its peers::

        class MappingReceiver(PeerReceiver):
            def __init__(self, timeout_seconds: float) -> None:
                super().__init__(partial(_Mapping, timeout_seconds=timeout_seconds))
                self.traits = ReceiverTraits(is_at_hand=self.is_at_hand)

            def is_at_hand(self, source: Source) -> bool:
                mapping = self._unused(source)
                return mapping is not None and mapping.is_mapped

    What stands for other receivers (``Chooser``, ``RankReader``) publishes traits that ask theirs. To add a trait, give it a
    default here that changes nothing for the receivers without it, and read it as ``receiver.traits.NAME``.
    """

    fetch_first: FetchFirst | None = None
    ask: Callable[[Source, Sequence[ReadRequest]], None] = lambda _source, _requests: None
    is_at_hand: Callable[[Source], bool] = lambda _source: False
    is_on_our_device: Callable[[Source], bool] = lambda _source: False


class ReceiverTransport(Protocol):
    """Reads blocks of other processes' pools. Thread-safe: one thread at a time fetches from one source."""

    @property
    def traits(self) -> ReceiverTraits:
        """Its abilities beyond these methods."""

    def fetch(self, source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        """Fill ``views[i]`` with the block ``request.first_block + i``; terminal when it returns or raises.

        Raises ReadStoppedError after ``read.stop()``, StaleLeaseError when the lease is over, TransferError else.
        """

    def forget(self, source: Source) -> None:
        """Drop all state of a source whose link is gone. A running read ends first, or fails."""

    def close(self) -> None:
        """Close every connection; a running read fails. Idempotent."""


class ProbingReceiver(ReceiverTransport, Protocol):
    """A receiver that can test whether a source is readable, and keeps the connection that the test opened."""

    def probe(self, source: Source, read: Read) -> float | None:
        """Return at how many bytes per second the source's null block is read; None if the transport measures nothing.

        Raises what a ``fetch`` would.
        """


def slowest(rates: Sequence[float | None]) -> float | None:
    """Return the lowest rate of several ranks (see ``ProbingReceiver``); None if one of them measures nothing."""
    measured = [rate for rate in rates if rate is not None]
    return min(measured) if measured and len(measured) == len(rates) else None


def fetch_first(
    receiver: ReceiverTransport,
    source: Source,
    request: ReadRequest,
    views: Sequence[memoryview],
    read: Read,
    following: Sequence[ReadRequest],
) -> None:
    """Fetch over any receiver; one that can do so sends the requests that follow ahead."""
    if (fetch := receiver.traits.fetch_first) is None:
        receiver.fetch(source, request, views, read)
    else:
        fetch(source, request, views, read, following)


@dataclass(frozen=True)
class Transport:
    """Both roles of one transport."""

    sender: Sender
    receiver: ProbingReceiver


class TransportSettings(TransferOptions, BootSettings):
    """The part of a connector's settings that its transports are opened with."""

    read_timeout_seconds: float = Field(default=10.0, gt=0)
    """A transfer fails if its data connection moves no byte for this time."""


@dataclass(frozen=True)
class TransportContext:
    """The arguments that every transport is opened with.

    on_idle: see ``Sender.release``; called from any thread. on_thread_failed: called in a thread of the transport that ends
    because of a bug and serves nothing any more.
    """

    settings: TransportSettings
    sessions: Sessions
    on_idle: Callable[[LeaseName], None]
    on_thread_failed: Callable[[str, BaseException], None] = lambda _thread, _error: None


class IdleTogether:
    """Calls ``on_idle`` once per release, when every sender has reported that it has no reader any more. Thread-safe.

    senders: their names; it may grow until the first report.
    """

    def __init__(self, senders: Collection[str], on_idle: Callable[[LeaseName], None]) -> None:
        self._senders = senders
        self._on_idle = on_idle
        self._lock = threading.Lock()
        self._reported: dict[LeaseName, Counter[str]] = {}

    def report(self, sender: str, name: LeaseName) -> None:
        """Record that this sender has no reader of the lease."""
        with self._lock:
            reported = self._reported.setdefault(name, Counter())
            reported[sender] += 1
            if not all(reported[each] for each in self._senders):
                return
            reported.subtract(list(self._senders))
            if not reported.total():
                del self._reported[name]
        self._on_idle(name)


class Senders:
    """Owns the senders by their transports' names, best first. Thread-safe, as they are."""

    def __init__(self, senders: Mapping[str, Sender]) -> None:
        self._senders = dict(senders)

    def offers(self) -> list[Offer]:
        """Return what a peer can read over, best first."""
        return [Offer(name, sender.address) for name, sender in self._offered()]

    def start(self, memory: KVMemory) -> None:
        """Lend from this pool."""
        for sender in self._senders.values():
            sender.start(memory)

    def publish(
        self, name: LeaseName, block_ids: Sequence[int], first_block: int = 0, group: int = 0
    ) -> tuple[tuple[str, bytes], ...]:
        """Append blocks to the lease on every offered sender; return (transport, grant) of those that return a grant."""
        offered = self._offered()
        granted = [(each, sender.publish(name, block_ids, first_block, group)) for each, sender in offered]
        return tuple((each, grant) for each, grant in granted if grant is not None)

    def release(self, name: LeaseName) -> None:
        """End the lease on every sender."""
        for sender in self._senders.values():
            sender.release(name)

    def close(self) -> None:
        """Close every sender."""
        for sender in self._senders.values():
            sender.close()

    def _offered(self) -> list[tuple[str, Sender]]:
        return [(name, sender) for name, sender in self._senders.items() if sender.why_not_offered is None]
