"""Aggregates the reports and answers of several ranks: one is passed on once all ranks have made it. All are thread-safe."""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from contract.errors import TransferError
from engine.mailbox import Mailbox
from kv_transfer.protocol import events as ev
from kv_transfer.protocol.events import ImpossibleEventError
from kv_transfer.protocol.reads import Read, Source
from kv_transfer.ranks.rank_messages import Answer, BeginSession, EndSession, Probe, Stop, ToRank

_Errors = dict[int, str | None]
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


class RankQuestions:
    """Owns the questions that are open, by key. A question is over when every rank has answered it. Thread-safe.

    The ranks serve a peer's reads, so a peer's link is up only after its session has begun on all ranks. Otherwise the peer
    could show its token to a rank that refuses it.
    """

    def __init__(self, num_ranks: int, send_to_all: Callable[[ToRank], None]) -> None:
        self._num_ranks = num_ranks
        self._send_to_all = send_to_all
        self._lock = threading.Lock()
        self._open: dict[str, tuple[_Errors, Callable[[_Errors | None], None]]] = {}
        self._is_closed = False
        self._num_probes = itertools.count(1)

    def begin(self, token: str, then: Callable[[], None]) -> bool:
        """Have every rank accept a token. Returns False: not from now on, but from when ``then`` is called, in any thread.

        It is not called if the session ends before.
        """
        self._ask(token, BeginSession(token), lambda errors: None if errors is None else then())
        return False

    def end(self, token: str) -> None:
        """Have every rank reject the token of a link that is gone."""
        with self._lock:
            self._open.pop(token, None)
        self._send_to_all(EndSession(token))

    def probe(self, source: Source, read: Read) -> None:
        """Block until all ranks have tried to read a source. Raises TransferError with the ranks that cannot, and why."""
        key = f"probe {next(self._num_probes)}"
        answers = Mailbox[_Errors | None]()
        self._ask(key, Probe(key, source), answers.put)
        read.when_stopped(partial(self._send_to_all, Stop(key)))
        errors = answers.get()
        read.check()
        if errors is None:
            raise TransferError("the ranks have ended")
        failed = [f"rank {rank}: {error}" for rank, error in sorted(errors.items()) if error is not None]
        if failed:
            raise TransferError("; ".join(failed))

    def answer(self, rank: int, answer: Answer) -> None:
        """Take a rank's answer."""
        with self._lock:
            if answer.key not in self._open:
                return
            errors, then = self._open[answer.key]
            errors[rank] = answer.error
            if len(errors) < self._num_ranks:
                return
            del self._open[answer.key]
        then(errors)

    def close(self) -> None:
        """End all questions, those that will be asked too: the ranks have ended."""
        with self._lock:
            self._is_closed = True
            questions = list(self._open.values())
            self._open.clear()
        for _, then in questions:
            then(None)

    def _ask(self, key: str, message: ToRank, then: Callable[[_Errors | None], None]) -> None:
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                self._open[key] = ({}, then)
        if is_closed:
            then(None)
        else:
            self._send_to_all(message)
