"""What several ranks report, as if it were one: it goes up when all of them have said it. Pure: no I/O, no lock."""

from collections import deque
from dataclasses import dataclass, field

from msgspec.structs import replace

from kv_transfer.protocol import events as ev
from kv_transfer.protocol.events import ImpossibleEventError

Range = ev.BlockRange | ev.RangeFailed


@dataclass
class _Job:
    """num_landed, over: by rank. num_told: blocks whose landing went up. is_stopping: the ranks were told to stop."""

    num_landed: list[int]
    over: dict[int, ev.FetchEvent] = field(default_factory=dict)
    num_told: int = 0
    is_stopping: bool = False


class JobGather:
    """Owns the jobs that run on all ranks. A job that failed on one is terminal when it is so on all (law 2)."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._jobs: dict[int, _Job] = {}

    def open(self, number: int) -> None:
        """A job goes to all ranks."""
        self._jobs[number] = _Job([0] * self._num_ranks)

    def landed(self, number: int, rank: int, piece: ev.PieceLanded) -> ev.PieceLanded | None:
        """Bytes are in place on one rank; returns what is so on every rank now and was not before, if any."""
        job = self._find(number, rank)
        job.num_landed[rank] += piece.num_blocks
        news = min(job.num_landed) - job.num_told
        if not news:
            return None
        job.num_told += news
        return replace(piece, num_blocks=news)

    def stop(self, number: int) -> bool:
        """True, once: the ranks must be told to stop. False where they were, or the job is over."""
        job = self._jobs.get(number)
        if job is None or job.is_stopping:
            return False
        job.is_stopping = True
        return True

    def over(self, number: int, rank: int, event: ev.FetchEvent) -> ev.FetchEvent | None:
        """The job is terminal on one rank; returns its end when it is so on all.

        A failure is the first one that was reported; who was only stopped says nothing. It may heal if all failures may.
        """
        job = self._find(number, rank)
        job.over[rank] = event
        if len(job.over) < self._num_ranks:
            return None
        del self._jobs[number]
        failures = [end for end in job.over.values() if isinstance(end, ev.JobFailed)]
        if failures:
            return replace(failures[0], may_heal=all(failure.may_heal for failure in failures))
        for end in job.over.values():
            if isinstance(end, ev.JobStopped):
                return end
        verified = [end for end in job.over.values() if isinstance(end, ev.PieceVerified)]
        return max(verified, key=lambda piece: piece.now, default=event)

    def waiting_for(self) -> dict[int, list[int]]:
        """Job → ranks on which it is not terminal."""
        return {
            number: [rank for rank in range(self._num_ranks) if rank not in job.over]
            for number, job in self._jobs.items()
        }

    def _find(self, number: int, rank: int) -> _Job:
        job = self._jobs.get(number)
        if job is None or rank in job.over:
            raise ImpossibleEventError(f"rank {rank} reports of job {number}, which is over there")
        return job


def has_failed(event: ev.FetchEvent) -> bool:
    """The job ended on a rank without success: on the others it is in vain."""
    return isinstance(event, (ev.JobFailed, ev.JobStopped))


class _Ranges:
    """Of one lent request: what each rank has reported beyond what went up.

    first: the next block. failed_end: behind the last block of an order that failed on a rank; None while none has.
    """

    def __init__(self, num_ranks: int, first: int) -> None:
        self.waiting: list[deque[Range]] = [deque() for _ in range(num_ranks)]
        self.first = first
        self.ends = [first] * num_ranks
        self.failure: ev.RangeFailed | None = None

    @property
    def is_empty(self) -> bool:
        return self.failure is None and not any(self.waiting)

    def take(self) -> Range | None:
        """The next range that all ranks are done with, if there is one."""
        if self.failure is None and all(self.waiting):
            heads = [waiting[0] for waiting in self.waiting]
            failures = [head for head in heads if isinstance(head, ev.RangeFailed)]
            if not failures:
                return self._join([self._pop(rank) for rank in range(len(heads))])
            self.failure = failures[0]
        return self._take_failure() if self.failure is not None else None

    def _take_failure(self) -> Range | None:
        """Once no rank digests a block of the order any more: the rest of it has failed."""
        assert self.failure is not None
        end = self.failure.first_block + self.failure.num_blocks
        for rank, waiting in enumerate(self.waiting):
            while waiting and self.ends[rank] < end:
                self._pop(rank)
        if any(done < end for done in self.ends):
            return None
        failed = replace(self.failure, first_block=self.first, num_blocks=end - self.first)
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
            raise ImpossibleEventError(f"the ranks have digested other ranges than {first.first_block}..")
        self.first = _end_of(first)
        return replace(first, others=tuple(others))


def _end_of(each: Range) -> int:
    count = len(each.digests) if isinstance(each, ev.BlockRange) else each.num_blocks
    return each.first_block + count


class RangeGather:
    """Owns the ranges that some ranks have digested and lent, and others have not yet, by the request's key."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._ranges: dict[str, _Ranges] = {}

    def add(self, key: str, rank: int, what: Range) -> list[Range]:
        """A rank is done with a range; returns what all are done with now, in order.

        A range that failed on one rank has failed, together with the rest of its order: it goes up when no rank reads a
        block of that order any more.
        """
        ranges = self._ranges.setdefault(key, _Ranges(self._num_ranks, what.first_block))
        ranges.waiting[rank].append(what)
        done: list[Range] = []
        while (each := ranges.take()) is not None:
            done.append(each)
        if ranges.is_empty:
            del self._ranges[key]
        return done

    def waiting(self) -> list[str]:
        """Requests of which some ranks are ahead of others."""
        return list(self._ranges)
