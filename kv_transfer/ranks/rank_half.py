"""The half of a connector in one of several ranks' processes: a ``DataHalf`` that gets its jobs over a socket."""

import logging
import threading
from contextlib import ExitStack
from socket import socket
from typing import Any

import msgspec

from contract.errors import InternalError, KvbatonError
from engine.connector import KVMemory
from kv_transfer.counters import Completions, Counters
from kv_transfer.protocol import events as ev
from kv_transfer.protocol.orders import CommitJob, PullJob, TransferMetadata
from kv_transfer.protocol.reads import LeaseName, Read
from kv_transfer.ranks import rank_messages as messages
from kv_transfer.ranks.rank_data import RankData, RankSettings
from kv_transfer.ranks.rank_sockets import RankSocket

logger = logging.getLogger(__name__)


def open_rank_half(settings: bytes, sock: socket) -> "RankHalf":
    """Open a rank's half of a connector whose control half has the other end of ``sock``. Owns ``sock``.

    settings: an encoded ``RankSettings``. Raises SettingError, and OSError when a port cannot be bound.
    """
    with ExitStack() as undo:
        undo.callback(sock.close)
        half = RankHalf(msgspec.msgpack.decode(settings, type=RankSettings), sock)
        undo.pop_all()
    return half


class RankHalf:
    """Fulfils ``RankConnector``, and ``DataReports`` towards its data half, whose jobs have the group's keys."""

    def __init__(self, settings: RankSettings, sock: socket) -> None:
        self._socket = RankSocket(sock)
        self._counters = Counters()
        self._data = RankData(settings, self._counters, Completions())
        self._data.attach(self)
        self._lock = threading.Lock()
        self._reads: dict[str, Read] = {}
        self._probes: dict[str, threading.Thread] = {}
        self._thread = threading.Thread(target=self._receive, name="kv-rank", daemon=True)

    def start(self, memory: KVMemory) -> None:
        """See RankConnector."""
        self._data.half.start(memory)
        self._report_counters()
        data = self._data
        self._socket.send(messages.Opened(data.offers(), data.readers(), data.probing()))
        self._thread.start()

    def watch_layers(self, metadata: Any) -> None:
        """See RankConnector: an engine of several ranks lends blocks when they are whole."""

    def execute(self, metadata: Any) -> None:
        """See RankConnector; ``metadata`` is a ``TransferMetadata`` as plain data, as it comes from another process."""
        self._data.half.execute(msgspec.convert(metadata, TransferMetadata))

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Return nothing: requests are finished where all ranks' reports are aggregated."""
        return set(), set()

    def close(self) -> None:
        """See RankConnector."""
        with self._lock:
            reads = list(self._reads.values())
            probes = list(self._probes.values())
        for read in reads:
            read.stop()
        self._data.half.close()
        for probe in probes:
            probe.join()
        self._socket.shut_down()
        if self._thread.is_alive():
            self._thread.join()
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
        logger.critical("thread %s has ended by a bug; this worker must end", thread, exc_info=error)
        self._socket.send(messages.ThreadFailed(thread, repr(error)))

    def _receive(self) -> None:
        try:
            for message in self._socket.messages():
                self._on_message(message)
        except Exception as error:  # noqa: BLE001 - the boundary of the thread: the connector must learn of its end
            self.thread_failed(self._thread.name, error)

    def _on_message(self, message: messages.ToRank) -> None:
        match message:
            case PullJob():
                self._begin_read(message.key, message.read)
                self._data.half.post_pull(message)
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
            case messages.Probe():
                self._start_probe(message)

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
            self._probes.pop(key, None)

    def _start_probe(self, probe: messages.Probe) -> None:
        """Probe in a thread of its own, because this one must go on to receive."""
        read = Read()
        self._begin_read(probe.key, read)
        name = f"kv-try-{probe.source.worker_id}"
        thread = threading.Thread(target=self._probe, args=(probe, read), name=name, daemon=True)
        with self._lock:
            thread.start()  # it needs the lock to end
            self._probes[probe.key] = thread

    def _probe(self, probe: messages.Probe, read: Read) -> None:
        source = probe.source
        error: str | None = None
        try:
            self._data.probe(source, read)
        except KvbatonError as failure:
            error = failure.message
        except Exception as failure:  # the boundary of a probe: the peer is read over something else
            logger.exception("probing worker %s over %s failed", source.worker_id, source.transport)
            error = repr(failure)
        self._end_read(probe.key)
        self._socket.send(messages.Answer(probe.key, error))

    def _report_counters(self) -> None:
        if added := self._counters.take():
            self._socket.send(messages.Counted(added))
