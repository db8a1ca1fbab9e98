"""Reports of several ranks as one report, made once all ranks have reported. No I/O; every class is thread-safe."""

import itertools
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from kv_transfer.protocol import events as ev
from kv_transfer.protocol.events import ImpossibleEventError

Range = ev.BlockRange | ev.RangeFailed


@dataclass
class _Job:
    """A job on all ranks. request: the key of its request. num_landed, ended: by rank. num_reported: landed blocks."""

    request: str
    num_landed: list[int]
    ended: dict[int, ev.FetchEvent] = field(default_factory=dict)
    num_reported: int = 0
    is_stopping: bool = False


class JobAggregator:
    """Owns the jobs that run on all ranks. A job that failed on one rank is terminal when it is so on all (law 2)."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._lock = threading.Lock()
        self._jobs: dict[str, _Job] = {}
        self._keys = itertools.count(1)

    def begin(self, request: str) -> str:
        """Add a job of this request that is sent to all ranks; return the job's key."""
        key = str(next(self._keys))
        with self._lock:
            self._jobs[key] = _Job(request, [0] * self._num_ranks)
        return key

    def add(self, key: str, rank: int, event: ev.FetchEvent) -> tuple[str, ev.FetchEvent] | None:
        """Take a rank's report on a job. If something is true on every rank now and was not before, return it.

        Returns the request's key and the event. A failure is the first one that was reported; a rank that was only stopped
        gives no reason. It may heal if the failures of all ranks may.
        """
        with self._lock:
            job = self._jobs.get(key)
            if job is None or rank in job.ended:
                raise ImpossibleEventError(f"rank {rank} reports on job {key}, which is over there")
            if isinstance(event, ev.PieceLanded):
                return self._add_landed(job, rank, event)
            job.ended[rank] = event
            if len(job.ended) < self._num_ranks:
                return None
            del self._jobs[key]
        return job.request, _end_of_all(list(job.ended.values()))

    def stop(self, key: str) -> bool:
        """Return whether the ranks must be asked to stop: they were not before, and the job is not over."""
        with self._lock:
            job = self._jobs.get(key)
            if job is None or job.is_stopping:
                return False
            job.is_stopping = True
            return True

    def debug_state(self) -> list[dict[str, object]]:
        """Return the request of each job, with the ranks on which the job is not terminal."""
        with self._lock:
            return [
                {
                    "request": job.request,
                    "ranks": [rank for rank in range(self._num_ranks) if rank not in job.ended],
                }
                for job in self._jobs.values()
            ]

    def _add_landed(self, job: _Job, rank: int, piece: ev.PieceLanded) -> tuple[str, ev.FetchEvent] | None:
        job.num_landed[rank] += piece.num_blocks
        num_new = min(job.num_landed) - job.num_reported
        job.num_reported += num_new
        return (job.request, replace(piece, num_blocks=num_new)) if num_new else None


def _end_of_all(ends: list[ev.FetchEvent]) -> ev.FetchEvent:
    failures = [end for end in ends if isinstance(end, ev.JobFailed)]
    if failures:
        return replace(failures[0], may_heal=all(failure.may_heal for failure in failures))
    for end in ends:
        if isinstance(end, ev.JobStopped):
            return end
    verified = [end for end in ends if isinstance(end, ev.PieceVerified)]
    return max(verified, key=lambda piece: piece.now, default=ends[-1])


def has_failed(event: ev.FetchEvent) -> bool:
    """Return whether the job ended on a rank without success, so that it is of no use on the others."""
    return isinstance(event, (ev.JobFailed, ev.JobStopped))


class _Ranges:
    """Reports on one lent request that are not aggregated yet. ends: by rank, behind the last aggregated block."""

    def __init__(self, num_ranks: int, first: int) -> None:
        self.waiting: list[deque[Range]] = [deque() for _ in range(num_ranks)]
        self.first = first
        self.ends = [first] * num_ranks
        self.failure: ev.RangeFailed | None = None

    @property
    def is_empty(self) -> bool:
        return self.failure is None and not any(self.waiting)

    def take(self) -> Range | None:
        """Return the next range that all ranks are done with, if there is one."""
        if self.failure is None and all(self.waiting):
            heads = [waiting[0] for waiting in self.waiting]
            failures = [head for head in heads if isinstance(head, ev.RangeFailed)]
            if not failures:
                return self._join([self._pop(rank) for rank in range(len(heads))])
            self.failure = failures[0]
        return None if self.failure is None else self._take_failure(self.failure)

    def _take_failure(self, failure: ev.RangeFailed) -> Range | None:
        """Fail the rest of the order, once no rank digests a block of it any more."""
        end = failure.first_block + failure.num_blocks
        for rank, waiting in enumerate(self.waiting):
            while waiting and self.ends[rank] < end:
                self._pop(rank)
        if any(done < end for done in self.ends):
            return None
        failed = replace(failure, first_block=self.first, num_blocks=end - self.first)
        self.failure = None
        self.first = end
        return failed

    def _pop(self, rank: int) -> Range:
        popped = self.waiting[rank].popleft()
        self.ends[rank] = _end_of(popped)
        return popped

    def _join(self, ranges: list[Range]) -> ev.BlockRange:
        ready = [each for each in ranges if isinstance(each, ev.BlockRange)]
        first, *others = ready
        if any((_end_of(each), each.first_block) != (_end_of(first), self.first) for each in ready):
            raise ImpossibleEventError(
                f"the ranks have digested different ranges from {first.first_block} on"
            )
        self.first = _end_of(first)
        return replace(first, others=tuple(others))


def _end_of(each: Range) -> int:
    count = len(each.digests) if isinstance(each, ev.BlockRange) else each.num_blocks
    return each.first_block + count


class RangeAggregator:
    """Owns the ranges that some ranks have digested and lent, and others have not yet, by the request's key."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._lock = threading.Lock()
        self._ranges: dict[str, _Ranges] = {}

    def add(self, key: str, rank: int, what: Range) -> list[Range]:
        """Take a rank's report; return the ranges that all ranks are done with now, in order.

        A range that failed on one rank has failed, together with the rest of its order. It is returned when no rank reads
        a block of that order any more.
        """
        with self._lock:
            ranges = self._ranges.setdefault(key, _Ranges(self._num_ranks, what.first_block))
            ranges.waiting[rank].append(what)
            done: list[Range] = []
            while (each := ranges.take()) is not None:
                done.append(each)
            if ranges.is_empty:
                del self._ranges[key]
            return done

    def waiting(self) -> list[str]:
        """Return the requests of which some ranks are ahead of others."""
        with self._lock:
            return list(self._ranges)


class RankProgress:
    """Owns the ranks' last progress reports. Thread-safe.

    Each report is counted too. A rank's receiving thread sends it behind everything else that the rank was sent, so the
    count shows that this thread works. A rank that has not answered is not asked again: a rank that hangs is not flooded.
    """

    def __init__(self, num_ranks: int) -> None:
        self._lock = threading.Lock()
        self._num_reports = [0] * num_ranks
        self._is_asked = [False] * num_ranks
        self._counts: dict[str, int] = {}

    def to_ask(self) -> list[int]:
        """Return the ranks that owe no report. From now on each of them does."""
        with self._lock:
            ranks = [rank for rank, is_asked in enumerate(self._is_asked) if not is_asked]
            for rank in ranks:
                self._is_asked[rank] = True
            return ranks

    def add(self, rank: int, counts: Mapping[str, int]) -> None:
        """Take a rank's report."""
        with self._lock:
            self._is_asked[rank] = False
            self._num_reports[rank] += 1
            for name, count in counts.items():
                self._counts[f"{name} on rank {rank}"] = count

    def counts(self) -> dict[str, int]:
        """Return every count by the name of its thread."""
        with self._lock:
            listeners = {f"listener on rank {rank}": count for rank, count in enumerate(self._num_reports)}
            return {**listeners, **self._counts}
