"""What runs beside the memory of one rank of several: a ``DataHalf`` with transports of its own, led over a line."""

import logging
import threading
from contextlib import ExitStack
from pathlib import Path
from socket import socket
from typing import Any

import msgspec

from contract.errors import KvbatonError
from engine.connector import KVMemory
from kv_transfer.counters import Completions, Counters
from kv_transfer.data.data_half import DataHalf
from kv_transfer.protocol import events as ev
from kv_transfer.protocol.orders import CommitJob, TransferMetadata
from kv_transfer.protocol.reads import LeaseName, Read, Source
from kv_transfer.ranks import words
from kv_transfer.ranks.lines import RankEnd
from kv_transfer.ranks.receivers import of_ranks, probe
from kv_transfer.transports.choosing import Chooser, Probing
from kv_transfer.transports.context import TransportContext
from kv_transfer.transports.leases import Sessions
from kv_transfer.transports.lending import Lending
from kv_transfer.transports.registry import open_transports

logger = logging.getLogger(__name__)


def open_rank_half(settings: bytes, line: socket) -> "RankHalf":
    """A rank's half of a connector whose control half is at the line's other end. Owns ``line``.

    settings: a ``RankSettings``. Raises SettingError, and OSError when a port cannot be bound.
    """
    with ExitStack() as undo:
        undo.callback(line.close)
        half = RankHalf(msgspec.msgpack.decode(settings, type=words.RankSettings), line)
        undo.pop_all()
    return half


class RankHalf:
    """Fulfils ``RankConnector`` and ``DataReports``. A job is named by its number, a lent request by its key."""

    def __init__(self, settings: words.RankSettings, line: socket) -> None:
        self._end = RankEnd(line, words.to_rank)
        self._sessions, self._counters, self._counted = Sessions(), Counters(), dict[str, float]()
        senders, receivers = open_transports(settings.transport, self._context(settings))
        self._lending = Lending(senders)
        self._readers = of_ranks(receivers, settings.rank, settings.num_ranks)
        by_name = Chooser(self._readers, self._counters)  # what is read over is chosen for all ranks together
        self._data = DataHalf(
            by_name, self._counters, Completions(), tuple(receivers), settings.max_staging_bytes
        )
        self._data.attach(self._lending, self)
        self._lock = threading.Lock()
        self._reads: dict[int, Read] = {}
        self._trials: dict[int, threading.Thread] = {}
        self._thread = threading.Thread(target=self._listen, name="kv-rank", daemon=True)

    def start(self, memory: KVMemory) -> None:
        """See RankConnector."""
        self._data.start(memory)
        probing = [name for name, reader in self._readers.items() if isinstance(reader, Probing)]
        self._count()
        self._end.say(words.Opened(self._lending.offers(), list(self._readers), probing))
        self._thread.start()

    def watch_layers(self, metadata: Any) -> None:
        """See RankConnector: an engine of several ranks lends blocks when they are whole."""

    def execute(self, metadata: Any) -> None:
        """See RankConnector; ``metadata`` is what msgspec made of a ``TransferMetadata`` on its way here."""
        self._data.execute(msgspec.convert(metadata, TransferMetadata))

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Nothing: requests are finished where all ranks' reports come together."""
        return set(), set()

    def close(self) -> None:
        """See RankConnector."""
        with self._lock:
            reads = list(self._reads.values())
            trials = list(self._trials.values())
        for read in reads:
            read.stop()
        self._data.close()
        for trial in trials:
            trial.join()
        self._end.hang_up()
        if self._thread.is_alive():
            self._thread.join()
        self._end.close()

    def send_event(self, key: str, event: ev.SendEvent) -> None:
        """From the data half."""
        if isinstance(event, ev.BlockRange):
            self._end.say(words.RangeIsReady(key, event))
        elif isinstance(event, ev.RangeFailed):
            self._end.say(words.RangeHasFailed(key, event))

    def end_expected(self, key: str, seconds: float) -> None:
        """From the data half: nothing, for no engine of several ranks estimates ends."""

    def fetch_event(self, key: str, event: ev.FetchEvent) -> None:
        """From the data half; ``key`` is a job's number."""
        if not isinstance(event, ev.PieceLanded):
            with self._lock:
                self._reads.pop(int(key), None)
            self._count()
        self._end.say(words.over_of(int(key), event))

    def lease_idle(self, name: LeaseName) -> None:
        """From a sender transport."""
        self._end.say(words.LeaseIdle(name))

    def thread_failed(self, thread: str, error: BaseException) -> None:
        """From any thread of this half."""
        logger.critical("thread %s has ended by a bug; this worker must end", thread, exc_info=error)
        self._end.say(words.ThreadFailed(thread, repr(error)))

    def _listen(self) -> None:
        try:
            self._end.listen(self._hear)
        except Exception as error:  # noqa: BLE001 - the boundary of the thread: the connector must hear of its end
            self.thread_failed(self._thread.name, error)

    def _hear(self, word: words.ToRank) -> None:
        match word:
            case words.Pull():
                self._data.post_pull(word.job(self._begin_read(word.number)))
            case words.Commit():
                read = self._begin_read(word.number)
                self._data.post_commit(CommitJob(str(word.number), word.block_ids, read))
            case words.Stop():
                self._stop(word.number)
            case words.Leave():
                self._data.leave(word.source)
            case words.Release():
                self._lending.release(word.name)
            case words.BeginSession():
                self._sessions.begin(word.token)
                self._end.say(words.SessionBegun(word.token))
            case words.EndSession():
                self._sessions.end(word.token)
            case words.ShowProgress():
                self._end.say(words.Progress(self._data.progress()))
            case words.TryPeer():
                self._try(word.number, word.source)

    def _begin_read(self, number: int) -> Read:
        read = Read()
        with self._lock:
            self._reads[number] = read
        return read

    def _stop(self, number: int) -> None:
        with self._lock:
            read = self._reads.get(number)
        if read is not None:
            read.stop()

    def _try(self, number: int, source: Source) -> None:
        """In a thread of its own: the line must be listened to."""
        read = self._begin_read(number)
        thread = threading.Thread(
            target=self._answer_trial,
            args=(number, source, read),
            name=f"kv-try-{source.worker_id}",
            daemon=True,
        )
        with self._lock:
            thread.start()  # it needs the lock to end
            self._trials[number] = thread

    def _answer_trial(self, number: int, source: Source, read: Read) -> None:
        why_not: str | None = None
        try:
            probe(self._readers[source.transport], source, read)
        except KvbatonError as error:
            why_not = error.message
        except Exception as error:  # the boundary of a trial: the peer is read over something else
            logger.exception("trying worker %s over %s failed", source.worker_id, source.transport)
            why_not = repr(error)
        with self._lock:
            self._reads.pop(number, None)
            self._trials.pop(number, None)
        self._end.say(words.Tried(number, why_not))

    def _count(self) -> None:
        """Tell what was counted since the last time."""
        with self._lock:
            now = self._counters.snapshot()
            added = {
                name: value - self._counted.get(name, 0.0)
                for name, value in now.items()
                if self._counted.get(name) != value
            }
            self._counted = now
            if added:
                self._end.say(words.Counted(added))

    def _context(self, settings: words.RankSettings) -> TransportContext:
        return TransportContext(
            host=settings.host,
            advertise_host=settings.advertise_host,
            data_port=settings.data_port,
            boot_id=settings.boot_id,
            read_timeout_seconds=settings.read_timeout_seconds,
            sessions=self._sessions,
            on_idle=self.lease_idle,
            shm_dir=None if settings.shm_dir is None else Path(settings.shm_dir),
            on_thread_failed=self.thread_failed,
        )
