"""The data half, beside the KV memory (``RankConnector``). Only its threads move and digest bytes.

One thread publishes what is lent and commits what has arrived; each peer that is read from has a thread of its own.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from contract.errors import ErrorKind, KvbatonError
from engine.connector import KVMemory, LayerWatch, states_of
from kv_transfer.counters import Completions, Counters
from kv_transfer.data.converting import Converter
from kv_transfer.data.publishing import PassWatch, Publisher
from kv_transfer.data.reading import BlockReader, DigestViews
from kv_transfer.data.threads import DataReports, JobThread, PullThreads
from kv_transfer.protocol import events as ev
from kv_transfer.protocol.digests import XXH3_64
from kv_transfer.protocol.orders import CommitJob, PullJob, orders_of
from kv_transfer.protocol.reads import ReadRequest, ReadStoppedError, Source, may_heal
from kv_transfer.settings import DEFAULT_STAGING_BYTES
from kv_transfer.transports.transport import ReceiverTransport, Senders

logger = logging.getLogger(__name__)

# Copied between two steps, at most, by the thread that orders it. They take a few milliseconds; a thread that must be
# woken for them gets a processor later than that if all are busy.
MAX_BYTES_AT_ONCE = 2**24


class DataHalf:
    """Owns the data thread and the pull threads. Jobs of one thread run in the order in which they are posted.

    transport_names: the possible values of ``Source.transport``, whose counters are visible from the start.
    max_staging_bytes: see ``TransferSettings``. digest: the algorithm by which blocks are announced, set by ``start``.
    """

    def __init__(
        self,
        receiver: ReceiverTransport,
        counters: Counters,
        completions: Completions,
        transport_names: Iterable[str],
        max_staging_bytes: int = DEFAULT_STAGING_BYTES,
    ) -> None:
        self.digest = XXH3_64
        self._receiver = receiver
        self._completions = completions
        self._num_bytes_at_once = 0
        self._is_closing = False
        self._thread = JobThread("kv-data", self._on_bug)
        self._pulls = PullThreads(self._forget, self._on_bug, ask=self._ask)
        self._reader = BlockReader(receiver, counters, self._pulls.following)
        self._converter = Converter(counters, max_staging_bytes, self._reader.read_share)
        self.post_probe = self._pulls.post
        for transport in transport_names:
            for name in ("transfer_blocks_total", "transfer_bytes_total"):
                counters.add(name, 0, transport=transport)

    def attach(self, senders: Senders, reports: DataReports) -> None:
        """Set what lends blocks and what receives the reports; called once, before ``start``."""
        self._senders = senders
        self._reports = reports

    def start(self, memory: KVMemory) -> None:
        """See RankConnector."""
        self._memory = memory
        views = list(map(DigestViews, memory.regions))
        self._reader.start(memory, views)
        self._converter.start(memory)
        publisher = Publisher(memory, views, self._senders, self._reports)
        self.digest = publisher.digest
        self._watch = PassWatch(memory, publisher, self._thread.post)
        self._senders.start(memory)
        self._thread.start()

    def execute(self, metadata: Any) -> None:
        """See RankConnector."""
        self._watch.end(orders_of(metadata))

    def watch_layers(self, metadata: Any) -> LayerWatch | None:
        """See RankConnector."""
        return self._watch.begin(orders_of(metadata))

    def get_finished(self) -> tuple[set[str], set[str]]:
        """See RankConnector. Called before each step."""
        self._num_bytes_at_once = 0
        return self._completions.drain()

    def post_pull(self, job: PullJob) -> Callable[[], None] | None:
        """Begin a read; it ends with PieceVerified, JobFailed or JobStopped.

        Return a call that runs it, if nothing is left to read, or if few bytes are to be copied from memory of this machine.
        The caller makes it soon, without a lock. None if the read was queued.
        """
        run = partial(self._run, job)
        if job.is_here:
            return run
        if self._may_run_at_once(job):
            claimed = self._pulls.claim(job.source, job.key, job.read, run)
            if claimed is not None:
                return claimed
        if not self._pulls.post(job.source, job.key, job.read, run, job.only_request):
            # Reported by the data thread: the caller holds the lock that the report takes.
            failed = ev.JobFailed(ErrorKind.UNAVAILABLE, "no thread can be started to read with")
            outcome = ev.JobStopped() if self._is_closing else failed
            self._thread.post(partial(self._reports.fetch_event, job.key, outcome))
        return None

    def post_commit(self, job: CommitJob) -> None:
        """Make blocks visible; it ends with CommitDone, JobFailed or JobStopped. Runs at once if it waits for nothing."""
        if all(map(_is_written, self._memory.regions)):
            self._run(job)
        else:
            self._thread.post(partial(self._run, job))

    def leave(self, source: Source) -> None:
        """End the thread of a source whose link is gone, once its reads are terminal."""
        self._reader.silences.forget(source)
        self._pulls.leave(source)

    def close(self) -> None:
        """Stop reads, close the receiver, without which some would never be terminal, then end the threads. Idempotent."""
        self._is_closing = True
        self._pulls.stop()
        self._receiver.close()
        self._pulls.join()
        self._thread.post(None)
        if self._thread.is_alive():
            self._thread.join()
        self._senders.close()

    def debug_state(self) -> dict[str, Any]:
        """Return what the threads do. current: the requests whose blocks are read."""
        return {
            "queued_jobs": self._thread.num_queued + self._pulls.num_queued,
            "current": self._pulls.current_keys,
        }

    def progress(self) -> dict[str, int]:
        """See ``ConnectorPair.progress``."""
        return {"thread that publishes KV": self._thread.progress()}

    def _forget(self, source: Source) -> None:
        self._receiver.forget(source)
        self._converter.forget(source)

    def _ask(self, source: Source, requests: Sequence[ReadRequest]) -> None:
        """Send requests ahead to a source of one rank: of several, each job names its own."""
        if source.num_ranks == 1:
            self._receiver.traits.ask(source, requests)

    def _on_bug(self, error: BaseException) -> None:
        self._reports.thread_failed(threading.current_thread().name, error)

    def _may_run_at_once(self, job: PullJob) -> bool:
        """Return whether a read copies few bytes from memory of this machine into a pool there; and count its bytes."""
        is_plain = job.conversion is None and job.part is None and self._memory.pool_view is not None
        if not is_plain:
            return False
        num_bytes = len(job.block_ids) * self._memory.regions[job.group].layout.block_bytes
        if self._num_bytes_at_once + num_bytes > MAX_BYTES_AT_ONCE:
            return False
        if not self._receiver.traits.is_at_hand(job.source):
            return False
        self._num_bytes_at_once += num_bytes
        return True

    def _work(self, job: PullJob | CommitJob) -> ev.FetchEvent:
        if isinstance(job, CommitJob):
            for region in self._memory.regions:
                region.commit(list(job.block_ids))
            if job.states is not None:
                record = states_of(self._memory.regions[job.states.group])
                record.note_received(job.states.pieces, job.states.num_tokens)
            return ev.CommitDone()
        if job.part is not None:
            return self._reader.read_ahead(job)
        if job.conversion is None:
            (begin, end) = self._reader.read(job)
        else:
            begin = time.monotonic()
            self._converter.convert(job, job.conversion)
            end = time.monotonic()
        self._reports.fetch_event(job.key, ev.PieceLanded(len(job.block_ids), begin, end))
        return ev.PieceVerified(len(job.block_ids), end)

    def _run(self, job: PullJob | CommitJob) -> None:
        """Run a job to exactly one terminal event, whatever happens."""
        # It was queued when the others were stopped.
        if self._is_closing:
            job.read.stop()
        outcome: ev.FetchEvent
        try:
            job.read.check()
            outcome = self._work(job)
        except ReadStoppedError:
            outcome = ev.JobStopped()
        except KvbatonError as error:
            outcome = ev.JobFailed(error.kind, error.message, may_heal(error))
        except Exception as error:  # the boundary of a job: its transfer fails, the others go on
            logger.exception("moving blocks of %s failed", job.key)
            outcome = ev.JobFailed(ErrorKind.INTERNAL, f"moving blocks failed: {error}")
        self._reports.fetch_event(job.key, outcome)


def _is_written(region: KVMemory) -> bool:
    """Return whether a commit would wait for nothing."""
    on_device = region.device_pool
    return region.pool_view is not None if on_device is None else on_device.is_written
