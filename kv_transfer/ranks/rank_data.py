"""The data half of one rank with the transports of its own; in the core's process, or in the rank's (``RankHalf``)."""

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from socket import socket
from typing import Any

from contract.decoding import converter
from contract.errors import InternalError, SettingError
from contract.layout import Side
from engine.connector import KVMemory
from kv_transfer.counters import Completions, Counters
from kv_transfer.data.data_half import DataHalf
from kv_transfer.data.threads import DataReports
from kv_transfer.protocol import events as ev
from kv_transfer.protocol.orders import CommitJob, PullJob, TransferMetadata
from kv_transfer.protocol.plan import head_sources
from kv_transfer.protocol.reads import LeaseName, Read, Source, rank_boot_id
from kv_transfer.ranks import rank_messages as messages
from kv_transfer.ranks.rank_messages import RankSocket
from kv_transfer.settings import TransferSettings
from kv_transfer.transports.choosing import Chooser
from kv_transfer.transports.leases import Sessions
from kv_transfer.transports.registry import open_transports
from kv_transfer.transports.transport import (
    ProbingReceiver,
    Senders,
    TransportContext,
    slowest,
)

logger = logging.getLogger(__name__)
_metadata = converter(TransferMetadata)


class RankSettings(TransferSettings):
    """The settings of one rank's transports; the data port and the boot id are this rank's."""

    rank: int
    num_ranks: int
    num_kv_heads: int

    def encoded(self) -> bytes:
        """Return the settings for the rank's process; it has no wrapped receiver."""
        return self.model_dump_json(exclude={"decorate"}).encode()


def rank_settings(settings: TransferSettings, side: Side) -> list[RankSettings]:
    """Return each rank's settings.

    A fixed data port is rank 0's; the others follow it. Raises SettingError for what cannot be sent to another process,
    and for a data port with too few ports behind it.
    """
    num_ranks = side.num_ranks
    if num_ranks > 1 and settings.decorate is not None:
        raise SettingError(f"decorate is for workers of one rank; this one has {num_ranks}", param="decorate")
    last_port = settings.data_port and settings.data_port + num_ranks - 1
    if last_port > 65535:
        raise SettingError(
            f"data_port is {settings.data_port}, and each of {num_ranks} ranks needs a port from there on;"
            f" it must be {65536 - num_ranks} or less",
            param="data_port",
        )
    values = dict(settings) | {"num_ranks": num_ranks, "num_kv_heads": side.num_kv_heads}
    values["secret"] = "-"  # no rank needs it
    each_rank = []
    for rank in range(num_ranks):
        values["rank"] = rank
        values["boot_id"] = rank_boot_id(settings.boot_id, rank, num_ranks)
        values["data_port"] = settings.data_port and settings.data_port + rank
        each_rank.append(RankSettings(**values))
    return each_rank


class RankData:
    """A ``DataHalf``, with what it lends and reads over. Its transports' ports are open when the constructor returns.

    Raises SettingError, and OSError when a port cannot be bound.
    """

    def __init__(self, settings: RankSettings, counters: Counters, completions: Completions) -> None:
        self.sessions = Sessions()
        context = TransportContext(
            settings,
            self.sessions,
            # Who receives the reports is set by ``attach``, after the transports are open.
            on_idle=lambda name: self._reports.lease_idle(name),
            on_thread_failed=lambda thread, error: self._reports.thread_failed(thread, error),
        )
        opened = open_transports(context)
        self._senders = Senders({name: transport.sender for name, transport in opened.items()})
        self.release = self._senders.release
        self._readers = {
            name: RankReader(transport.receiver, settings.rank, settings.num_ranks, settings.num_kv_heads)
            for name, transport in opened.items()
        }
        self.chooser = Chooser(counters)
        receiver = self.chooser if settings.decorate is None else settings.decorate(self.chooser)
        self.half = DataHalf(receiver, counters, completions, tuple(opened), settings.max_staging_bytes)
        self.chooser.start(self._readers, self.half.post_pull)

    def attach(self, reports: DataReports) -> None:
        """Set the receiver of the reports; called once, before ``half.start``."""
        self._reports = reports
        self.half.attach(self._senders, reports)

    def opened(self) -> messages.Opened:
        """Return what can be read over, and what is lent over; that may be less once the pool is known."""
        return messages.Opened(self._senders.offers(), list(self._readers), self.half.digest)

    def connect_ahead(self, source: Source, then: Callable[[], None]) -> None:
        """Open what a source is read over; see ``Connect``. It has been probed if there was a choice."""

        def connect(chosen: Source) -> None:
            read = Read()

            def work() -> None:
                self.chooser.try_out(chosen, read)
                then()

            if not self.half.post_probe(chosen, f"connect {chosen.worker_id}", read, work):
                then()

        self.chooser.when_chosen(source, connect)

    def close(self) -> None:
        """Close the transports of a half that was never started; a half closes them itself (``half.close``)."""
        self._senders.close()


class RankReader:
    """A receiver for peers of several ranks: the source of a link names all, ``fetch`` gets one rank's.

    It keeps something open to each of the peer's ranks that this rank reads from. rank, num_ranks, num_kv_heads: this
    worker's.
    """

    def __init__(self, receiver: ProbingReceiver, rank: int, num_ranks: int, num_kv_heads: int) -> None:
        self._receiver = receiver
        self._rank = rank
        self._num_ranks = num_ranks
        self._num_kv_heads = num_kv_heads
        self.fetch = receiver.fetch
        self.close = receiver.close
        self.traits = replace(
            receiver.traits,
            # A thread serves the orders of an engine of several ranks, and is not to copy meanwhile.
            is_at_hand=lambda source: (
                num_ranks == source.num_ranks == 1 and receiver.traits.is_at_hand(source)
            ),
            # Of the ranks that are read, the first one.
            is_on_our_device=lambda source: receiver.traits.is_on_our_device(self._each(source)[0]),
        )

    def probe(self, source: Source, read: Read) -> float | None:
        """See ProbingReceiver; every rank of ``source``, of which the slowest counts."""
        return slowest([self._receiver.probe(each, read) for each in self._each(source)])

    def forget(self, source: Source) -> None:
        """See ReceiverTransport; every rank of ``source``."""
        for each in self._each(source):
            self._receiver.forget(each)

    def _each(self, source: Source) -> list[Source]:
        sources = head_sources(self._num_kv_heads, self._num_ranks, self._rank, source.num_ranks)
        return [source.of_rank(rank) for rank, _ in sources]


def _make(call: Callable[[], None] | None) -> None:
    if call is not None:
        call()


class RankHalf:
    """Fulfils ``RankConnector``, and ``DataReports`` towards its data half, whose jobs have the group's keys.

    settings: ``RankSettings.encoded``. sock: owned; the control half has the other end. Raises SettingError, and OSError
    when a port cannot be bound.
    """

    def __init__(self, settings: bytes, sock: socket) -> None:
        self._socket = RankSocket(sock, messages.to_rank, self._on_message, self.thread_failed, "kv-rank")
        self._counters = Counters()
        self._lock = threading.Lock()
        self._reads: dict[str, Read] = {}
        try:
            self._data = RankData(RankSettings.model_validate_json(settings), self._counters, Completions())
        except BaseException:
            self._socket.close()
            raise
        self._data.attach(self)

    def start(self, memory: KVMemory) -> None:
        """See RankConnector."""
        self._data.half.start(memory)
        # With their zeros, so that the metrics are visible before the first transfer.
        self._report_counters()
        self._socket.send(self._data.opened())
        self._socket.start()

    def watch_layers(self, metadata: Any) -> None:
        """See RankConnector: an engine of several ranks lends blocks when they are whole."""

    def execute(self, metadata: Any) -> None:
        """See RankConnector; ``metadata`` is a ``TransferMetadata`` as plain data, as it comes from another process."""
        self._data.half.execute(_metadata(metadata))

    def get_finished(self) -> tuple[set[str], set[str]]:
        """Return nothing: requests are finished where all ranks' reports are aggregated."""
        return set(), set()

    def close(self) -> None:
        """See RankConnector."""
        self._data.half.close()
        self._socket.close()

    def send_event(self, key: str, event: ev.SendEvent) -> None:
        """See DataReports."""
        if isinstance(event, (ev.BlockRange, ev.RangeFailed)):
            self._socket.send(messages.RangeReport(key, event))

    def end_expected(self, key: str, seconds: float) -> None:
        """See DataReports: an engine of several ranks does not estimate ends."""

    def fetch_event(self, key: str, event: ev.FetchEvent) -> None:
        """See DataReports."""
        if not isinstance(event, messages.JobEvent):
            raise InternalError(f"a job of several ranks cannot report {type(event).__name__}")
        if not isinstance(event, ev.PieceLanded):
            self._end_read(key)
            self._report_counters()
        self._socket.send(messages.JobReport(key, event))

    def lease_idle(self, name: LeaseName) -> None:
        """See DataReports."""
        self._socket.send(messages.LeaseIdle(name))

    def thread_failed(self, thread: str, error: BaseException) -> None:
        """See DataReports."""
        logger.critical("thread %s has ended because of a bug; this worker must end", thread, exc_info=error)
        self._socket.send(messages.ThreadFailed(thread, repr(error)))

    def _on_message(self, message: messages.ToRank) -> None:
        match message:
            case PullJob():
                self._begin_read(message.key, message.read)
                _make(self._data.half.post_pull(message))
            case CommitJob():
                self._begin_read(message.key, message.read)
                self._data.half.post_commit(message)
            case messages.Stop(key):
                self._stop(key)
            case messages.Forget(source):
                self._data.half.leave(source)
            case messages.Release(name):
                self._data.release(name)
            case messages.BeginSession(token):
                self._data.sessions.begin(token)
                self._socket.send(messages.Answer(token))
            case messages.EndSession(token):
                self._data.sessions.end(token)
            case messages.RequestProgress():
                self._socket.send(messages.Progress(self._data.half.progress()))
            case messages.Probe(key, source):
                self._post_probe(key, source)

    def _begin_read(self, key: str, read: Read) -> None:
        with self._lock:
            self._reads[key] = read

    def _stop(self, key: str) -> None:
        with self._lock:
            read = self._reads.get(key)
        if read is not None:
            read.stop()

    def _end_read(self, key: str) -> None:
        with self._lock:
            self._reads.pop(key, None)

    def _post_probe(self, key: str, source: Source) -> None:
        read = Read()
        self._begin_read(key, read)
        if not self._data.half.post_probe(source, key, read, partial(self._probe, key, source, read)):
            self._end_probe(key, "no thread can be started")

    def _probe(self, key: str, source: Source, read: Read) -> None:
        tried = self._data.chooser.try_out(source, read)
        self._end_probe(key, None if tried.error is None else tried.error.message, tried.bytes_per_second)

    def _end_probe(self, key: str, why_not: str | None, bytes_per_second: float | None = None) -> None:
        self._end_read(key)
        self._socket.send(messages.Answer(key, why_not, bytes_per_second))

    def _report_counters(self) -> None:
        if added := self._counters.drain():
            self._socket.send(messages.Counted(added))
