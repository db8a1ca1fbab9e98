"""The data halves of several ranks as one: what the control half uses in place of one rank's, and their executor's side.

Jobs, releases and sessions are sent to every rank; what the ranks report is passed on once all have reported it.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from socket import socket
from typing import Any

from msgspec.structs import replace

from contract.errors import InternalError, SettingError
from engine.connector import RankConnector, RankConnectorPlan
from kv_transfer.counters import Counters
from kv_transfer.data.threads import DataReports
from kv_transfer.protocol import events as ev
from kv_transfer.protocol.messages import Offer
from kv_transfer.protocol.orders import CommitJob, PullJob
from kv_transfer.protocol.reads import LeaseName, Read, ReadRequest, Source
from kv_transfer.ranks import rank_messages as messages
from kv_transfer.ranks.aggregation import JobAggregator, RangeAggregator, RankProgress, RankQuestions
from kv_transfer.ranks.rank_data import RankSettings
from kv_transfer.ranks.rank_messages import RankSockets
from kv_transfer.transports.choosing import Chooser
from kv_transfer.transports.transport import IdleTogether, ReceiverTraits

_OPENER = "kv_transfer.ranks.rank_data:RankHalf"
_OPEN_SECONDS = 30.0


class RankDataGroup:
    """Sends to the ranks and aggregates their reports, which come in the sockets' threads. Thread-safe.

    Fulfils ``RanksConnector``. settings: of each rank. sessions: the tokens by which peers with a control link may read.
    """

    def __init__(
        self,
        settings: Sequence[RankSettings],
        counters: Counters,
        get_finished: Callable[[], tuple[set[str], set[str]]],
    ) -> None:
        num_ranks = len(settings)
        self._settings = settings
        self.chooser = Chooser(counters)
        self.sessions = RankQuestions(num_ranks, self._send_to_all)
        self.get_finished = get_finished
        self._opening: list[Future[messages.Opened]] = [Future() for _ in settings]
        self._counters = counters
        self._jobs = JobAggregator(num_ranks, self._send_to_all)
        self._ranges = RangeAggregator(num_ranks)
        self._progress = RankProgress(num_ranks)
        self._sockets: RankSockets | None = None

    def attach(self, reports: DataReports, serve: Callable[[], None]) -> None:
        """Set the receiver of the reports, and how peers are served from ``begin`` on; called once, before ``connect``."""
        self._reports = reports
        self._serve = serve
        self._idle = IdleTogether([str(each.rank) for each in self._settings], reports.lease_idle)

    def in_process(self) -> RankConnector:
        """Raise SettingError: each half is opened in its rank's process."""
        raise SettingError(
            f"the connector is for {len(self._settings)} ranks, each in a process of its own",
            param="tensor_parallel_size",
        )

    def connect(self, sockets: Sequence[socket], peers: Sequence[int]) -> list[RankConnectorPlan]:
        """See RanksConnector."""
        self._sockets = RankSockets(sockets, self._on_message, self._reports.thread_failed)
        encoded = [each.encoded() for each in self._settings]
        return [RankConnectorPlan(_OPENER, *each) for each in zip(encoded, peers, strict=True)]

    def begin(self, timeout_seconds: float = _OPEN_SECONDS) -> None:
        """See RanksConnector. Raises InternalError for ranks that do not open their transports in time, or do not match."""
        wait(self._opening, timeout_seconds)
        missing = [rank for rank, opened in enumerate(self._opening) if not opened.done()]
        if missing:
            raise InternalError(f"ranks {missing} did not open their transports in {timeout_seconds} s")
        receiver = RankReceiver(self._send_to_all, self.sessions.probe)
        self.chooser.start(dict.fromkeys(self.opened().readers, receiver), self.post_pull)
        self._serve()

    def opened(self) -> messages.Opened:
        """Return what the transports of all ranks can do together; nothing before the last rank has opened its own."""
        if not all(opened.done() for opened in self._opening):
            return messages.Opened([], [])
        return _together([opened.result() for opened in self._opening])

    def post_pull(self, job: PullJob) -> None:
        """Have every rank read its share; ends with PieceVerified, JobFailed or JobStopped.

        Raises InternalError for a read ahead, which no sender of several ranks offers.
        """
        if job.part is not None or job.ahead is not None:
            raise InternalError(f"blocks of {job.key} cannot be read ahead by several ranks")
        key = self._jobs.begin(job.key)
        for rank in range(len(self._settings)):
            self._connected.send(rank, replace(job.in_rank(rank), key=key))
        # Behind the jobs: a rank ignores a stop of a job that it does not have.
        job.read.when_stopped(partial(self._jobs.stop, key))

    def post_commit(self, job: CommitJob) -> None:
        """Have every rank commit; ends with CommitDone, JobFailed or JobStopped."""
        key = self._jobs.begin(job.key)
        self._send_to_all(replace(job, key=key))
        job.read.when_stopped(partial(self._jobs.stop, key))

    def release(self, name: LeaseName) -> None:
        """End a lease on every rank; ``lease_idle`` is reported when no rank reads it any more."""
        self._send_to_all(messages.Release(name))

    def leave(self, source: Source) -> None:
        """Have the ranks close what is open to a source whose link is gone, once their reads are terminal."""
        self.chooser.forget(source)

    def connect_ahead(self, source: Source, then: Callable[[], None]) -> None:
        """See ``Connect``. The ranks have connected for the probe if there was a choice; else they do at the first read."""
        self.chooser.when_chosen(source, lambda _chosen: then())

    def close(self) -> None:
        """Fail the probes that run, and close the sockets. Idempotent."""
        self.sessions.close()
        self.chooser.close()
        if self._sockets is not None:
            self._sockets.close()

    def debug_state(self) -> dict[str, Any]:
        """Return what the ranks are doing. current: requests whose blocks are moved, with the ranks that are not done."""
        return {
            "current": self._jobs.debug_state(),
            "uneven_ranges": self._ranges.waiting(),
            "unsent_messages": [] if self._sockets is None else self._sockets.unsent_messages,
        }

    def progress(self) -> dict[str, int]:
        """See ``ConnectorPair``: the threads that move KV are in the ranks' processes, which report their counts."""
        if self._sockets is not None:
            for rank in self._progress.to_ask():
                self._sockets.send(rank, messages.RequestProgress())
        return self._progress.counts()

    @property
    def _connected(self) -> RankSockets:
        if self._sockets is None:
            raise InternalError("the ranks are used before they are connected")
        return self._sockets

    def _send_to_all(self, message: messages.ToRank) -> None:
        self._connected.send_to_all(message)

    def _on_message(self, rank: int, message: messages.FromRank) -> None:
        match message:
            case messages.RangeReport(key, event):
                for done in self._ranges.add(key, rank, event):
                    self._reports.send_event(key, done)
            case messages.JobReport(key, event):
                self._on_job_report(rank, key, event)
            case messages.LeaseIdle(name):
                self._idle.report(str(rank), name)
            case messages.Answer():
                self.sessions.answer(rank, message)
            case messages.Counted(added):
                self._counters.merge(added)
            case messages.Progress(counts):
                self._progress.add(rank, counts)
            case messages.Opened():
                self._opening[rank].set_result(message)
            case messages.ThreadFailed(thread, error):
                self._reports.thread_failed(thread, InternalError(f"on rank {rank}: {error}"))

    def _on_job_report(self, rank: int, key: str, event: ev.FetchEvent) -> None:
        if (outcome := self._jobs.add(key, rank, event)) is not None:
            self._reports.fetch_event(*outcome)


def _together(ranks: list[messages.Opened]) -> messages.Opened:
    """Return what every rank can do, best first as on rank 0. Raises InternalError if their digests differ."""
    if len({rank.digest for rank in ranks}) > 1:
        digests = ", ".join(f"{rank.digest} on rank {number}" for number, rank in enumerate(ranks))
        raise InternalError(f"the ranks announce blocks by different digests: {digests}")
    readers = [name for name in ranks[0].readers if all(name in rank.readers for rank in ranks)]
    offers = []
    addresses = [{offer.transport: offer.address for offer in rank.offers} for rank in ranks]
    for name in addresses[0]:
        if all(name in each for each in addresses):
            first, *others = [each[name] for each in addresses]
            offers.append(Offer(name, first, tuple(others)))
    return messages.Opened(offers, readers, ranks[0].digest)


class RankReceiver:
    """The transports over which the ranks read; the chooser has it in place of a receiver. probe: see ProbingReceiver."""

    traits = ReceiverTraits()

    def __init__(
        self, send_to_all: Callable[[messages.ToRank], None], probe: Callable[[Source, Read], float | None]
    ) -> None:
        self._send_to_all = send_to_all
        self.probe = probe

    def fetch(self, source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        """Raise InternalError: jobs are sent to the ranks."""
        raise InternalError(f"blocks of worker {source.worker_id} are read by the ranks")

    def forget(self, source: Source) -> None:
        """See ReceiverTransport."""
        self._send_to_all(messages.Forget(source))

    def close(self) -> None:
        """Do nothing: the ranks close what they have opened."""
