"""The data half, beside the KV memory (``RankConnector``): its threads alone move and digest bytes.

One thread digests what is lent and makes visible what has arrived; each peer that is read from has a thread of its own
(``pulling``).
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from contract.errors import ErrorKind, InternalError, KvbatonError, TransferError
from engine.connector import KVMemory, LayerWatch
from engine.mailbox import Mailbox
from kv_transfer.counters import Completions, Counters
from kv_transfer.data.digesting import Landing, UnfinishedBlocks
from kv_transfer.data.layer_watch import PassJobs, PassListeners
from kv_transfer.data.pulling import PullThreads
from kv_transfer.data.reports import DataReports
from kv_transfer.data.silences import Silences
from kv_transfer.data.staging import DEFAULT_STAGING_BYTES, Staging
from kv_transfer.protocol import events as ev
from kv_transfer.protocol.digests import Share, digests_of
from kv_transfer.protocol.orders import Ahead, CommitJob, Conversion, PublishOrder, PullJob, orders_of
from kv_transfer.protocol.reads import (
    BlockPart,
    PeerSilentError,
    Read,
    ReadRequest,
    ReadStoppedError,
    Source,
    blocks_per_piece,
    grants_within,
    may_heal,
)
from kv_transfer.transports.block_views import BlockViews, KeptViews, is_flat, read_views, write_views
from kv_transfer.transports.lending import Lending
from kv_transfer.transports.transport import ReceiverTransport

logger = logging.getLogger(__name__)


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
        self._jobs = Mailbox[Callable[[], None] | None]()
        self._current: CommitJob | None = None
        self._unfinished: dict[str, UnfinishedBlocks] = {}
        self._is_closing = False
        self._has_counted, self._num_done = True, 0
        self._thread = threading.Thread(target=self._run, name="kv-data", daemon=True)
        self._silences = Silences()
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
        self._kept_views = KeptViews(memory) if is_flat(memory) else None
        jobs = PassJobs(self._jobs.put, self._publish_layers, self._publish, self._foresee)
        self._listeners = PassListeners(memory, jobs)
        self._lending.start(memory)
        self._thread.start()

    def execute(self, metadata: Any) -> None:
        """Digest and publish what the step that just ran has computed, but for what was published in the meantime."""
        for order in orders_of(metadata):
            if not self._listeners.has_published(order):
                self._jobs.put(partial(self._publish, order))

    def watch_layers(self, metadata: Any) -> LayerWatch | None:
        """Who makes this step's blocks readable layer by layer, and foresees its end, where that is of use to receivers."""
        return self._listeners.begin(orders_of(metadata))

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Keys (sent, received) since the last call."""
        return self._completions.take()

    def post_pull(self, job: PullJob) -> None:
        """Queue a read; it ends with PieceVerified, JobFailed or JobStopped. At once where nothing is left to be read."""
        if job.is_here:
            self._pull(job)
        elif not self._pulls.post(job):
            failed = ev.JobFailed(ErrorKind.UNAVAILABLE, "no thread can be had to read with")
            outcome = ev.JobStopped() if self._is_closing else failed
            self._jobs.put(partial(self._reports.fetch_event, job.key, outcome))

    def post_commit(self, job: CommitJob) -> None:
        """Queue a commit; it ends with CommitDone, JobFailed or JobStopped. At once where there is nothing to do for it."""
        if is_flat(self._memory):
            self._commit(job)
        else:
            self._jobs.put(partial(self._commit_queued, job))

    def leave(self, source: Source) -> None:
        """The link of this source is gone: its thread ends when its reads are terminal."""
        self._silences.forget(source)
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
            "queued_jobs": self._jobs.num_waiting + self._pulls.num_queued,
            "num_pull_threads": self._pulls.num_threads,
            "silent": self._silences.debug_state(),
            "current": self._pulls.current_keys + ([] if commit is None else [commit.key]),
        }

    def progress(self) -> dict[str, int]:
        """See ``ShowsProgress``: the count moves when the data thread has done what it was given before."""
        if self._has_counted:
            self._has_counted = False
            self._jobs.put(self._count)
        return {"thread that publishes KV": self._num_done}

    def _count(self) -> None:
        self._has_counted = True

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                job()
                self._num_done += 1
        except Exception as error:  # noqa: BLE001 - the boundary of the thread: the connector must hear of its end
            self._has_bug(error)

    def _has_bug(self, error: BaseException) -> None:
        self._reports.thread_failed(threading.current_thread().name, error)

    def _publish_layers(self, order: PublishOrder, num_bytes: int) -> None:
        """The first so many bytes of each block are computed: digest them, and make them readable."""
        is_new = order.key not in self._unfinished
        unfinished = self._unfinished.setdefault(order.key, UnfinishedBlocks(order.block_ids, order.seeds))
        try:
            unfinished.advance(self._memory, num_bytes)
            for start, end in self._ranges(order):
                grants = self._lending.publish(order.name, order.block_ids[start:end]) if is_new else ()
                ready = ev.LayerRange(order.first_block + start, end - start, num_bytes, grants)
                self._reports.send_event(order.key, ready)
        except Exception as error:  # noqa: BLE001 - the boundary of a job: the range fails once it is published
            unfinished.error = error

    def _foresee(self, orders: Sequence[PublishOrder], end: float) -> None:
        seconds = max(0.0, end - time.monotonic())
        for order in orders:
            self._reports.end_expected(order.key, seconds)

    def _ranges(self, order: PublishOrder) -> Iterator[tuple[int, int]]:
        step, num_blocks = blocks_per_piece(self._memory.layout.block_bytes), len(order.block_ids)
        return ((start, min(start + step, num_blocks)) for start in range(0, num_blocks, step))

    def _publish(self, order: PublishOrder) -> None:
        """Range by range: the receiver copies and verifies one while the next is being digested."""
        num_blocks, unfinished = len(order.block_ids), self._unfinished.pop(order.key, None)
        for start, end in self._ranges(order):
            outcome: ev.SendEvent
            try:
                outcome = self._publish_range(order, start, end, unfinished)
            except Exception as error:  # the boundary of a job: its transfer fails, the others go on
                logger.exception("publishing blocks of %s failed", order.key)
                first, what = order.first_block + start, f"publishing failed: {error}"
                outcome = ev.RangeFailed(first, num_blocks - start, ErrorKind.INTERNAL, what)
            self._reports.send_event(order.key, outcome)
            if isinstance(outcome, ev.RangeFailed):
                return

    def _publish_range(
        self, order: PublishOrder, start: int, end: int, unfinished: UnfinishedBlocks | None
    ) -> ev.BlockRange:
        first = order.first_block + start
        if unfinished is not None:  # it is lent already
            return ev.BlockRange(first, unfinished.finish(self._memory, start, end))
        block_ids = order.block_ids[start:end]
        views = self._to_digest(read_views(self._memory, block_ids))
        digests = digests_of(views, order.seeds[start:end])
        return ev.BlockRange(first, digests, self._lending.publish(order.name, block_ids))

    def _pull(self, job: PullJob) -> None:
        work = self._move_and_verify if job.part is None else self._read_ahead
        self._finish(job, partial(work, job))

    def _commit_queued(self, job: CommitJob) -> None:
        self._current = job
        try:
            self._commit(job)
        finally:
            self._current = None

    def _commit(self, job: CommitJob) -> None:
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
            outcome = ev.JobFailed(error.kind, error.message, may_heal(error))
        except Exception as error:  # the boundary of a job: its transfer fails, the others go on
            logger.exception("moving blocks of %s failed", job.key)
            outcome = ev.JobFailed(ErrorKind.INTERNAL, f"moving blocks failed: {error}")
        self._reports.fetch_event(job.key, outcome)

    def _move_and_verify(self, job: PullJob) -> ev.FetchEvent:
        begin = time.monotonic()
        if job.conversion is not None:
            self._convert(job, job.conversion, write_views(self._memory, job.block_ids))
            end = time.monotonic()
        elif job.ahead is not None and job.ahead.is_of_use:
            begin, end = self._read_rest(job, job.ahead)
        else:
            views = write_views(self._memory, job.block_ids)
            begin, end = self._read(job, job.shares[0], job.first_block, views)
        self._reports.fetch_event(job.key, ev.PieceLanded(len(job.block_ids), begin, end))
        return ev.PieceVerified(len(job.block_ids), end)

    def _read_ahead(self, job: PullJob) -> ev.FetchEvent:
        """Read a part of each block, and go on with the digests. After a failure the blocks are read as a whole."""
        part, ahead = job.part, job.ahead
        if part is None or ahead is None:
            raise InternalError("a read ahead says what it reads")
        if not ahead.goes_on_with(job.first_block, len(job.block_ids), part.start_byte):
            return ev.ReadAheadOver(None)
        views = write_views(self._memory, job.block_ids, part)
        request = ReadRequest(job.name, job.first_block, len(views), job.grants, part)
        landing = Landing(lambda start, end: ahead.digests.go_on(views[start:end], start))
        try:
            self._fetch(job.source, request, views, job.read, landing)
        except ReadStoppedError:
            raise
        except KvbatonError as error:
            ahead.has_failed = True
            logger.debug("reading ahead for %s failed: %s", job.key, error.message)
            return ev.ReadAheadOver(None)
        ahead.num_read += part.num_bytes
        return ev.ReadAheadOver((landing.begin, time.monotonic()))

    def _convert(self, job: PullJob, conversion: Conversion, views: Sequence[memoryview]) -> None:
        """Piece by piece: read the sender's blocks into staging, verify them there, and only then write ours."""
        from kv_transfer.data.converting import convert_blocks

        plan, ours = conversion.plan, conversion.first_block
        with self._staging.buffer(conversion) as buffer:
            for first, end in self._staging.pieces(conversion):
                blocks, rest = conversion.sources_of(first, end), buffer
                sources: dict[int, tuple[int, memoryview]] = {}
                for share in job.shares:
                    num_bytes = len(blocks) * plan.theirs.layout.block_bytes
                    content, rest = rest[:num_bytes], rest[num_bytes:]
                    self._stage(job, share, blocks, content)
                    sources[share.rank] = (blocks.start, content)
                targets = views[first - ours : end - ours]
                convert_blocks(plan, sources, first, targets, conversion.num_tokens, conversion.our_rank)
        self._counters.add("transfer_converted_blocks_total", len(views))

    def _stage(self, job: PullJob, share: Share, blocks: range, content: memoryview) -> None:
        """Read these blocks of one of the sender's ranks."""
        size = content.nbytes // len(blocks)
        staged = [content[start : start + size] for start in range(0, content.nbytes, size)]
        self._read(job, share, blocks.start, staged)

    def _read(
        self,
        job: PullJob,
        share: Share,
        first_block: int,
        views: Sequence[memoryview],
    ) -> tuple[float, float]:
        """Read, and verify each piece as it lands.

        Returns when the copy began and when all of it was verified; what verifying took is left out of the time between.
        """
        count, offset = len(views), first_block - job.first_block
        grants = grants_within(job.grants, first_block, first_block + count)
        of_rank = tuple(grant for grant in grants if grant.rank == share.rank)
        contents = self._to_digest(views)

        def verify(start: int, end: int) -> None:
            job.read.check()
            found = digests_of(contents[start:end], job.seeds[offset + start : offset + end])
            self._compare(job, share, first_block + start, found)

        landing = Landing(verify)
        request = ReadRequest(job.name, first_block, count, of_rank)
        self._fetch(job.source.of_rank(share.rank), request, views, job.read, landing)
        self._counters.add("transfer_blocks_total", count, transport=job.source.transport)
        return landing.begin, time.monotonic()

    def _read_rest(self, job: PullJob, ahead: Ahead) -> tuple[float, float]:
        """The same for blocks whose beginning is here, or all of them."""
        count, at = len(job.block_ids), job.first_block - ahead.first_block
        num_missing = self._memory.layout.block_bytes - ahead.num_read
        views: Sequence[memoryview] = ()

        def verify(start: int, end: int) -> None:
            job.read.check()
            ahead.digests.go_on(views[start:end], at + start)
            found = ahead.digests.values(at + start, at + end)
            self._compare(job, job.shares[0], job.first_block + start, found)

        landing = Landing(verify)
        if num_missing:
            part = BlockPart(ahead.num_read, num_missing)
            views = write_views(self._memory, job.block_ids, part)
            request = ReadRequest(job.name, job.first_block, count, job.grants, part)
            self._fetch(job.source, request, views, job.read, landing)
        landing.landed(count)
        self._counters.add("transfer_blocks_total", count, transport=job.source.transport)
        return landing.begin, time.monotonic()

    def _fetch(
        self,
        source: Source,
        request: ReadRequest,
        views: Sequence[memoryview],
        read: Read,
        landing: Landing,
    ) -> None:
        self._silences.check(source)
        try:
            with read.reporting(landing.landed):
                self._receiver.fetch(source, request, views, read)
        except PeerSilentError as error:
            self._silences.began(source, error)
            raise
        self._silences.ended(source)
        landing.landed(len(views))
        num_bytes = len(views) * views[0].nbytes
        self._counters.add("transfer_bytes_total", num_bytes, transport=source.transport)

    def _compare(self, job: PullJob, share: Share, first_block: int, found: tuple[int, ...]) -> None:
        """Raise TransferError unless the blocks' digests are those that were announced."""
        offset = first_block - job.first_block
        announced = share.digests[offset : offset + len(found)]
        if found != announced:
            bad = next(at for at in range(len(found)) if found[at] != announced[at])
            self._counters.add("transfer_digest_mismatches_total")
            of_rank = f" of rank {share.rank}" if job.source.num_ranks > 1 else ""
            raise TransferError(
                f"block {first_block + bad}{of_rank} of transfer {job.name.transfer_id} (attempt"
                f" {job.name.attempt}) from worker {job.source.worker_id} failed its digest check:"
                f" {found[bad]:016x} arrived, {announced[bad]:016x} was announced"
            )

    def _to_digest(self, views: Sequence[memoryview]) -> Sequence[memoryview]:
        """The same blocks, by views that are kept where these are whole blocks of a flat pool."""
        if self._kept_views is None or not isinstance(views, BlockViews) or views.part is not None:
            return views
        return self._kept_views.of(views.block_ids)

    def _make_visible(self, job: CommitJob) -> ev.FetchEvent:
        self._memory.commit(list(job.block_ids))
        return ev.CommitDone()
