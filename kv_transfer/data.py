"""The data half, beside the KV memory (``RankConnector``): its threads alone move and digest bytes.

One thread digests what is lent and makes visible what has arrived; each peer that is read from has a thread of its own
(``pulling``).
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import xxhash

from contract.errors import ErrorKind, InternalError, KvbatonError, TransferError
from engine.connector import KVMemory
from kv_transfer import events as ev
from kv_transfer.counters import Completions, Counters
from kv_transfer.orders import CommitJob, Conversion, PublishOrder, PullJob, TransferMetadata
from kv_transfer.pulling import PullThreads
from kv_transfer.staging import DEFAULT_STAGING_BYTES, Staging
from kv_transfer.transport import (
    LeaseName,
    ReadRequest,
    ReadStoppedError,
    ReceiverTransport,
    Source,
    blocks_per_piece,
    grants_within,
    write_views,
)
from kv_transfer.transports.lending import Lending

logger = logging.getLogger(__name__)
_DIGESTED_AT_ONCE = 2**20


class DataReports(Protocol):
    """What the data half tells the control half; called from any thread."""

    def send_event(self, key: str, event: ev.SendEvent) -> None:
        """Something happened to a lent request."""

    def fetch_event(self, key: str, event: ev.FetchEvent) -> None:
        """Something happened to a fetched request; every posted job ends with exactly one terminal event."""

    def lease_idle(self, name: LeaseName) -> None:
        """Nobody reads a revoked lease any more."""

    def thread_failed(self, thread: str, error: BaseException) -> None:
        """A thread of the connector has ended by a bug: nothing that it served can end properly any more."""


class DataHalf:
    """Owns the data thread and the pull threads. Jobs of one thread run in the order in which they are posted.

    transport_names: what ``Source.transport`` may be, so that every counter is visible from the start.
    max_staging_bytes: see ``TransferSettings``.
    """

    def __init__(
        self,
        receiver: ReceiverTransport,
        counters: Counters,
        completions: Completions,
        transport_names: Iterable[str],
        max_staging_bytes: int = DEFAULT_STAGING_BYTES,
    ) -> None:
        self._receiver, self._counters, self._completions = receiver, counters, completions
        self._transport_names = tuple(transport_names)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._current: CommitJob | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kv-data", daemon=True)
        self._staging = Staging(counters, max_staging_bytes)
        self._pulls = PullThreads(self._pull, receiver.forget, self._has_bug)
        for transport in self._transport_names:
            for name in ("transfer_blocks_total", "transfer_bytes_total"):
                counters.add(name, 0, transport=transport)
        for name in ("transfer_digest_mismatches_total", "transfer_converted_blocks_total"):
            counters.add(name, 0)

    def attach(self, lending: Lending, reports: DataReports) -> None:
        """Say who lends and who listens; called once, before ``start``."""
        self._lending, self._reports = lending, reports

    def start(self, memory: KVMemory) -> None:
        """Begin to work on ``memory``."""
        self._memory = memory
        self._lending.start(memory)
        self._thread.start()

    def execute(self, metadata: Any) -> None:
        """Digest and publish what the step that just ran has computed."""
        if not isinstance(metadata, TransferMetadata):
            raise InternalError(f"orders of type {type(metadata).__name__}; they must be TransferMetadata")
        for order in metadata.orders:
            self._jobs.put(partial(self._publish, order))

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Keys (sent, received) since the last call."""
        return self._completions.take()

    def post_pull(self, job: PullJob) -> None:
        """Queue a read; it ends with PieceVerified, JobFailed or JobStopped."""
        if not self._pulls.post(job):
            failed = ev.JobFailed(ErrorKind.UNAVAILABLE, "no thread can be had to read with")
            outcome = ev.JobStopped() if self._is_closing else failed
            self._jobs.put(partial(self._reports.fetch_event, job.key, outcome))

    def post_commit(self, job: CommitJob) -> None:
        """Queue a commit; it ends with CommitDone, JobFailed or JobStopped."""
        self._jobs.put(partial(self._commit, job))

    def leave(self, source: Source) -> None:
        """The link of this source is gone: its thread ends when its reads are terminal."""
        self._pulls.leave(source)

    def close(self) -> None:
        """Stop reads, end the receiver, without which some would never be terminal, then the threads. Idempotent."""
        self._is_closing = True
        current = self._current
        if current is not None:
            current.read.stop()
        self._pulls.stop()
        self._receiver.close()
        self._pulls.join()
        self._jobs.put(None)
        if self._thread.is_alive():
            self._thread.join()
        self._lending.close()

    def debug_state(self) -> dict[str, Any]:
        """What the threads do now. current: the requests whose blocks are moved or made visible."""
        commit = self._current
        return {
            "transports": list(self._transport_names),
            "is_alive": self._thread.is_alive(),
            "queued_jobs": self._jobs.qsize() + self._pulls.num_queued,
            "num_pull_threads": self._pulls.num_threads,
            "current": self._pulls.current_keys + ([] if commit is None else [commit.key]),
        }

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                job()
        except Exception as error:  # noqa: BLE001 - the boundary of the thread: the connector must hear of its end
            self._has_bug(error)

    def _has_bug(self, error: BaseException) -> None:
        self._reports.thread_failed(threading.current_thread().name, error)

    def _publish(self, order: PublishOrder) -> None:
        """Range by range: the receiver copies and verifies one while the next is being digested."""
        step, num_blocks = blocks_per_piece(self._memory.layout.block_bytes), len(order.block_ids)
        for start in range(0, num_blocks, step):
            outcome: ev.SendEvent
            try:
                outcome = self._publish_range(order, start, min(start + step, num_blocks))
            except Exception as error:  # the boundary of a job: its transfer fails, the others go on
                logger.exception("publishing blocks of %s failed", order.key)
                first, what = order.first_block + start, f"publishing failed: {error}"
                outcome = ev.RangeFailed(first, num_blocks - start, ErrorKind.INTERNAL, what)
            self._reports.send_event(order.key, outcome)
            if isinstance(outcome, ev.RangeFailed):
                return

    def _publish_range(self, order: PublishOrder, start: int, end: int) -> ev.RangeReady:
        block_ids, seeds = order.block_ids[start:end], order.seeds[start:end]
        digests = tuple(
            digest_of(self._memory.read_view(block_id), seed)
            for block_id, seed in zip(block_ids, seeds, strict=True)
        )
        grants = self._lending.publish(order.name, block_ids)
        return ev.RangeReady(order.first_block + start, digests, grants)

    def _pull(self, job: PullJob) -> None:
        self._finish(job, partial(self._move_and_verify, job))

    def _commit(self, job: CommitJob) -> None:
        self._current = job
        self._finish(job, partial(self._make_visible, job))

    def _finish(self, job: PullJob | CommitJob, work: Callable[[], ev.FetchEvent]) -> None:
        """Run a job to exactly one terminal event, whatever happens."""
        if self._is_closing:
            job.read.stop()
        outcome: ev.FetchEvent
        try:
            job.read.check()
            outcome = work()
        except ReadStoppedError:
            outcome = ev.JobStopped()
        except KvbatonError as error:
            outcome = ev.JobFailed(error.kind, error.message)
        except Exception as error:  # the boundary of a job: its transfer fails, the others go on
            logger.exception("moving blocks of %s failed", job.key)
            outcome = ev.JobFailed(ErrorKind.INTERNAL, f"moving blocks failed: {error}")
        finally:
            if isinstance(job, CommitJob):
                self._current = None
        self._reports.fetch_event(job.key, outcome)

    def _move_and_verify(self, job: PullJob) -> ev.FetchEvent:
        views = write_views(self._memory, job.block_ids)
        begin = time.monotonic()
        if job.conversion is not None:
            self._convert(job, job.conversion, views)
            self._tell_landed(job, len(views), begin, time.monotonic())
        else:
            self._read(job, job.first_block, views, partial(self._tell_landed, job))
        return ev.PieceVerified(len(views), time.monotonic())

    def _tell_landed(self, job: PullJob, num_blocks: int, begin: float, end: float) -> None:
        self._reports.fetch_event(job.key, ev.PieceLanded(num_blocks, begin, end))

    def _convert(self, job: PullJob, conversion: Conversion, views: Sequence[memoryview]) -> None:
        """Piece by piece: read the sender's blocks into staging, verify them there, and only then write ours."""
        from kv_transfer.converting import convert_blocks  # it needs torch, which direct reads do without

        plan = conversion.plan
        block_bytes, ours = plan.theirs.layout.block_bytes, conversion.first_block
        with self._staging.buffer(conversion) as buffer:
            for first, end in self._staging.pieces(conversion):
                sources = conversion.sources_of(first, end)
                content = buffer[: len(sources) * block_bytes]
                staged = [content[at : at + block_bytes] for at in range(0, len(content), block_bytes)]
                self._read(job, sources.start, staged)
                targets = views[first - ours : end - ours]
                convert_blocks(plan, {0: (sources.start, content)}, first, targets, conversion.num_tokens)
        self._counters.add("transfer_converted_blocks_total", len(views))

    def _read(
        self,
        job: PullJob,
        first_block: int,
        views: Sequence[memoryview],
        told: Callable[[int, float, float], None] = lambda _num_blocks, _begin, _end: None,
    ) -> None:
        """Read, and verify each piece as it lands: while the next one is on its way, and this one is still in cache.

        told: hears (blocks, begin, end) of each copy, before it is verified.
        """
        count, transport = len(views), job.source.transport
        num_verified, begin = 0, time.monotonic()

        def verify(num_landed: int) -> None:
            nonlocal num_verified, begin
            if num_landed > num_verified:
                told(num_landed - num_verified, begin, time.monotonic())
                self._verify_all(job, first_block + num_verified, views[num_verified:num_landed])
                num_verified, begin = num_landed, time.monotonic()

        grants = tuple(grants_within(job.grants, first_block, first_block + count))
        request = ReadRequest(job.name, list(range(first_block, first_block + count)), grants)
        with job.read.telling(verify):
            self._receiver.fetch(job.source, request, views, job.read)
        verify(count)
        self._counters.add("transfer_blocks_total", count, transport=transport)
        self._counters.add("transfer_bytes_total", count * views[0].nbytes, transport=transport)

    def _verify_all(self, job: PullJob, first_block: int, views: Sequence[memoryview]) -> None:
        for offset, view in enumerate(views, start=first_block - job.first_block):
            job.read.check()
            self._verify(job, offset, view)

    def _verify(self, job: PullJob, offset: int, view: memoryview) -> None:
        found = digest_of(view, job.seeds[offset])
        if found != job.digests[offset]:
            self._counters.add("transfer_digest_mismatches_total")
            raise TransferError(
                f"block {job.first_block + offset} of transfer {job.name.transfer_id} (attempt"
                f" {job.name.attempt}) from worker {job.source.worker_id} failed its digest check:"
                f" {found:016x} arrived, {job.digests[offset]:016x} was announced"
            )

    def _make_visible(self, job: CommitJob) -> ev.FetchEvent:
        self._memory.commit(list(job.block_ids))
        return ev.CommitDone()


def digest_of(block: memoryview, seed: int) -> int:
    """What a block is announced and verified with. Python's lock can be had by others after every mebibyte."""
    if block.nbytes <= _DIGESTED_AT_ONCE:
        return int(xxhash.xxh3_64_intdigest(block, seed=seed))
    digest = xxhash.xxh3_64(seed=seed)
    for start in range(0, block.nbytes, _DIGESTED_AT_ONCE):
        digest.update(block[start : start + _DIGESTED_AT_ONCE])
    return int(digest.intdigest())
