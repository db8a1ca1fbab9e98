"""The reading side of the data half: reads a peer's blocks, and verifies them as they land."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from contract.errors import InternalError, KvbatonError, TransferError
from engine.connector import KVMemory
from kv_transfer.counters import Counters
from kv_transfer.protocol import events as ev
from kv_transfer.protocol.digests import FOLD64, XXH3_64, Share, digests_of
from kv_transfer.protocol.orders import Ahead, PullJob
from kv_transfer.protocol.reads import (
    BlockPart,
    PeerSilentError,
    ReadRequest,
    ReadStoppedError,
    Source,
    grants_within,
)
from kv_transfer.transports.block_views import (
    BlockViews,
    LandingViews,
    read_views,
    settle,
    view_bytes_of,
    write_views,
)
from kv_transfer.transports.transport import ReceiverTransport, fetch_first

logger = logging.getLogger(__name__)
FIRST_PAUSE_SECONDS = 10.0
LONGEST_PAUSE_SECONDS = 60.0
MAX_KEPT_VIEWS = 2**14

Copied = tuple[float, float]
"""The times at which a copy began and ended, without the time that verifying took."""


class DigestViews(dict[int, memoryview]):
    """Views of blocks to digest; those of whole blocks of a flat pool are kept. Used from any thread.

    Making a view takes half as long as digesting it.
    """

    def __init__(self, memory: KVMemory) -> None:
        super().__init__()
        self._memory = memory

    def of(self, views: Sequence[memoryview]) -> Sequence[memoryview]:
        """Return views of the same blocks, kept ones if possible."""
        if not isinstance(views, BlockViews) or views.part is not None:
            return views
        if len(self) > MAX_KEPT_VIEWS:  # Python's garbage collector visits each view
            self.clear()
        return list(map(self.__getitem__, views.block_ids))

    def __missing__(self, block_id: int) -> memoryview:
        """Make a view at its first use."""
        view = self[block_id] = self._memory.read_view(block_id)
        return view


class Landing:
    """Digests the blocks of a read as they land: while the next ones are on their way, and these are still cached.

    digest: called once for each range ``start``..``end`` - 1. begin: when the copy began; moved by the time that digesting
    took, so that only copying is measured.
    """

    def __init__(self, digest: Callable[[int, int], None]) -> None:
        self._digest = digest
        self._num_digested = 0
        self.begin = time.monotonic()

    def digest_up_to(self, num_blocks: int) -> None:
        """Record that the first ``num_blocks`` blocks have arrived and digest the new ones."""
        if num_blocks > self._num_digested:
            landed_at = time.monotonic()
            self._digest(self._num_digested, num_blocks)
            self._num_digested = num_blocks
            self.begin += time.monotonic() - landed_at


class BlockReader:
    """Reads blocks over a receiver. Called from the threads of the sources.

    following: returns the requests that are read from a source after the one that is read now.
    """

    def __init__(
        self,
        receiver: ReceiverTransport,
        counters: Counters,
        following: Callable[[Source], Sequence[ReadRequest]],
    ) -> None:
        self._receiver = receiver
        self._following = following
        self._counters = counters
        self.silences = Silences()
        counters.add("transfer_digest_mismatches_total", 0)

    def start(self, memory: KVMemory, views: Sequence[DigestViews]) -> None:
        """Read into this pool, and its further regions; called once, before anything is read. views: of each region."""
        self._regions = memory.regions
        self._views = views

    def read(self, job: PullJob) -> Copied:
        """Read and verify the blocks of a job that needs no conversion."""
        if job.ahead is not None and job.ahead.is_of_use:
            return self._read_rest(job, job.ahead)
        views = write_views(self._regions[job.group], job.block_ids, read=job.read)
        return self.read_share(job, job.shares[0], job.first_block, views)

    def read_share(self, job: PullJob, share: Share, first_block: int, views: Sequence[memoryview]) -> Copied:
        """Read blocks of one of the sender's ranks, and verify each piece as it lands."""
        offset = first_block - job.first_block
        grants = grants_within(job.grants, first_block, first_block + len(views))
        of_rank = tuple(grant for grant in grants if grant.rank == share.rank)
        algorithm = job.source.digest
        contents = self._views[job.group].of(views) if algorithm == XXH3_64 else views

        def digest(start: int, end: int) -> tuple[int, ...]:
            return digests_of(algorithm, contents[start:end], job.seeds[offset + start : offset + end])

        request = ReadRequest(job.name, first_block, len(views), of_rank, group=job.group)
        return self._read_verified(job, share, request, views, digest)

    def read_ahead(self, job: PullJob) -> ev.ReadAheadOver:
        """Read a part of each block, and those before it that were not read, and continue its digest.

        A device digests whole blocks at their end. After a failure the blocks are read as a whole.
        """
        ahead = job.ahead
        if job.part is None or ahead is None:
            raise InternalError("a read ahead lacks its part")
        memory = self._regions[job.group]
        is_last = job.part.start_byte + job.part.num_bytes >= memory.layout.block_bytes
        # Each read stops the pass that computes on the same device, so this part is read together with the next one.
        if not is_last and self._receiver.traits.is_on_our_device(job.source):
            return ev.ReadAheadOver(None)
        part = ahead.up_to(job.part)
        if not ahead.goes_on_with(job.first_block, len(job.block_ids), part.start_byte):
            return ev.ReadAheadOver(None)
        views = write_views(memory, job.block_ids, part, job.read)
        request = ReadRequest(job.name, job.first_block, len(views), job.grants, part, job.group)

        def digest(start: int, end: int) -> None:
            if not _is_left_to_device(job, views):
                ahead.check_digested()
                ahead.digests.go_on(views[start:end], start)
            settle(views[start:end])

        landing = Landing(digest)
        try:
            self._fetch(job, 0, request, views, landing)
        except ReadStoppedError:
            raise
        except KvbatonError as error:
            ahead.has_failed = True
            logger.debug("reading ahead for %s failed: %s", job.key, error.message)
            return ev.ReadAheadOver(None)
        ahead.note_read(part.num_bytes, is_digested=not _is_left_to_device(job, views))
        if ahead.num_read == memory.layout.block_bytes and (arrived := ahead.undigested):
            ahead.digests.go_on(read_views(memory, job.block_ids, arrived))
            ahead.num_digested = ahead.num_read
        return ev.ReadAheadOver((landing.begin, time.monotonic()))

    def _read_rest(self, job: PullJob, ahead: Ahead) -> Copied:
        """Read and verify blocks whose first bytes, or all bytes, were read ahead."""
        offset = job.first_block - ahead.first_block
        undigested = ahead.undigested
        memory = self._regions[job.group]
        arrived = [] if undigested is None else read_views(memory, job.block_ids, undigested)
        num_missing = memory.layout.block_bytes - ahead.num_read
        part = BlockPart(ahead.num_read, num_missing) if num_missing else None
        views = [] if part is None else write_views(memory, job.block_ids, part, job.read)

        def digest(start: int, end: int) -> tuple[int, ...]:
            ahead.digests.go_on(arrived[start:end], offset + start)
            ahead.digests.go_on(views[start:end], offset + start)
            return ahead.digests.values(offset + start, offset + end)

        request = ReadRequest(job.name, job.first_block, len(job.block_ids), job.grants, part, job.group)
        return self._read_verified(job, job.shares[0], request, views, digest)

    def _read_verified(
        self,
        job: PullJob,
        share: Share,
        request: ReadRequest,
        views: Sequence[memoryview],
        digest: Callable[[int, int], tuple[int, ...]],
    ) -> Copied:
        """Read into ``views``, if there are any, and compare what ``digest`` returns for each piece."""

        def verify(start: int, end: int) -> None:
            job.read.check()
            self._compare(job, share, request.first_block + start, digest(start, end))
            settle(views[start:end])

        landing = Landing(verify)
        if views:
            self._fetch(job, share.rank, request, views, landing)
        landing.digest_up_to(request.num_blocks)
        self._counters.add("transfer_blocks_total", request.num_blocks, transport=job.source.transport)
        return landing.begin, time.monotonic()

    def _fetch(
        self, job: PullJob, rank: int, request: ReadRequest, views: Sequence[memoryview], landing: Landing
    ) -> None:
        source = job.source.of_rank(rank)
        self.silences.check(source)
        try:
            with job.read.reporting(landing.digest_up_to):
                following = self._following(job.source) if job.conversion is None else ()  # else it goes on
                fetch_first(self._receiver, source, request, views, job.read, following)
        except PeerSilentError as error:
            self.silences.record(source, error)
            raise
        self.silences.clear(source)
        landing.digest_up_to(len(views))
        num_bytes = len(views) * view_bytes_of(views)
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
                f"block {first_block + bad}{of_rank} of {job.name} from worker {job.source.worker_id} failed its"
                f" digest check: {found[bad]:016x} arrived, {announced[bad]:016x} was announced"
            )


def _is_left_to_device(job: PullJob, views: Sequence[memoryview]) -> bool:
    """Return whether a part that has landed is digested with the rest of its blocks, by the device."""
    return job.source.digest == FOLD64 and isinstance(views, LandingViews) and views.folds_there


@dataclass
class _Silence:
    """A source that did not answer: no read of it is tried before ``until``, and then one."""

    message: str
    pause_seconds: float
    until: float


class Silences:
    """Owns which sources are silent. Thread-safe.

    A time-out for each read does not bound a queue of reads. So after one read has timed out, every read of its source
    fails at once during a pause, which doubles with each further failure; the first read after a pause is a trial.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._silences: dict[tuple[str, str, str], _Silence] = {}

    def check(self, source: Source) -> None:
        """Raise PeerSilentError during a pause of the source."""
        with self._lock:
            silence = self._silences.get(_key(source))
            left = 0.0 if silence is None else silence.until - self._clock()
        if silence is not None and left > 0:
            raise PeerSilentError(f"{silence.message}; it is not tried again for {left:.1f} s")

    def record(self, source: Source, error: PeerSilentError) -> None:
        """Begin a pause: a read of the source has timed out."""
        with self._lock:
            known = self._silences.get(_key(source))
            pause = FIRST_PAUSE_SECONDS if known is None else 2 * known.pause_seconds
            pause = min(pause, LONGEST_PAUSE_SECONDS)
            self._silences[_key(source)] = _Silence(error.message, pause, self._clock() + pause)

    def clear(self, source: Source) -> None:
        """Allow reads of a source that has answered."""
        if self._silences:  # without the lock: most reads find nothing here
            with self._lock:
                self._silences.pop(_key(source), None)

    def forget(self, source: Source) -> None:
        """Remove all records of a link that is gone, whatever the transport and rank."""
        with self._lock:
            for key in [key for key in self._silences if key[0] == source.token]:
                del self._silences[key]


def _key(source: Source) -> tuple[str, str, str]:
    return source.token, source.transport, source.address
