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
from kv_transfer.transports.transport import slowest

Range = ev.BlockRange | ev.RangeFailed
_ENDED = "the ranks have ended"


@dataclass
class _Job:
    """A job on all ranks. request: the key of its request. num_landed: blocks by rank. running: ranks that still work on it.

    ends: of the other ranks, in the order in which they were reported.
    """

    request: str
    num_landed: list[int]
    running: set[int]
    ends: list[ev.FetchEvent] = field(default_factory=list)
    is_stopping: bool = False


class JobAggregator:
    """Owns the jobs that run on all ranks.

    A job that failed or was stopped on one rank is of no use: it is stopped on the others, and is terminal when it is so on
    all (law 2).
    """

    def __init__(self, num_ranks: int, send_to_all: Callable[[ToRank], None]) -> None:
        self._num_ranks = num_ranks
        self._send_to_all = send_to_all
        self._lock = threading.Lock()
        self._jobs: dict[str, _Job] = {}
        self._keys = itertools.count(1)

    def begin(self, request: str) -> str:
        """Add a job of this request that is sent to all ranks; return the job's key."""
        key = str(next(self._keys))
        with self._lock:
            self._jobs[key] = _Job(request, [0] * self._num_ranks, set(range(self._num_ranks)))
        return key

    def add(self, key: str, rank: int, event: ev.FetchEvent) -> tuple[str, ev.FetchEvent] | None:
        """Take a rank's report on a job. If something is true on every rank now and was not before, return it.

        Returns the request's key and the event. A failure is the first one that was reported; a rank that was only stopped
        gives no reason. It may heal if the failures of all ranks may.
        """
        with self._lock:
            job = self._jobs.get(key)
            if job is None or rank not in job.running:
                raise ImpossibleEventError(f"rank {rank} reports on job {key}, which is over there")
            if isinstance(event, ev.PieceLanded):
                num_before = min(job.num_landed)
                job.num_landed[rank] += event.num_blocks
                num_new = min(job.num_landed) - num_before
                return (job.request, replace(event, num_blocks=num_new)) if num_new else None
            job.running.remove(rank)
            job.ends.append(event)
            is_over = not job.running
            if is_over:
                del self._jobs[key]
        if is_over:
            failures = [end for end in job.ends if isinstance(end, ev.JobFailed)]
            if failures:
                heals = all(failure.may_heal for failure in failures)
                return job.request, replace(failures[0], may_heal=heals)
            if ev.JobStopped() in job.ends:
                return job.request, ev.JobStopped()
            verified = [end for end in job.ends if isinstance(end, ev.PieceVerified)]
            return job.request, max(verified, key=lambda piece: piece.now, default=job.ends[-1])
        if isinstance(event, (ev.JobFailed, ev.JobStopped)):
            self.stop(key)
        return None

    def stop(self, key: str) -> None:
        """Have the ranks stop a job, once and unless it is over."""
        with self._lock:
            job = self._jobs.get(key)
            if job is None or job.is_stopping:
                return
            job.is_stopping = True
        self._send_to_all(Stop(key))

    def debug_state(self) -> list[dict[str, object]]:
        """Return the request of each job, with the ranks on which the job is not terminal."""
        with self._lock:
            return [{"request": job.request, "ranks": sorted(job.running)} for job in self._jobs.values()]


class RangeAggregator:
    """Owns the ranges that some ranks have digested and lent, and others have not yet, by the request's key."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._lock = threading.Lock()
        self._ranges: dict[str, list[deque[Range]]] = {}
        """By rank, in order. All ranks get the same orders, so their first ranges begin with the same block."""

    def add(self, key: str, rank: int, what: Range) -> list[Range]:
        """Take a rank's report; return the ranges that all ranks are done with now, in order.

        A range that failed on one rank has failed, together with the rest of its order. It is returned when no rank reads
        a block of that order any more.
        """
        with self._lock:
            by_rank = self._ranges.setdefault(key, [deque() for _ in range(self._num_ranks)])
            by_rank[rank].append(what)
            done: list[Range] = []
            while all(by_rank) and (each := _pop_common(by_rank)) is not None:
                done.append(each)
            if not any(by_rank):
                del self._ranges[key]
            return done

    def waiting(self) -> list[str]:
        """Return the requests of which some ranks are ahead of others."""
        with self._lock:
            return list(self._ranges)


def _pop_common(by_rank: list[deque[Range]]) -> Range | None:
    """Remove and return the next range if all ranks are done with it; every rank has reported one at least."""
    heads = [ranges[0] for ranges in by_rank]
    failure = next((head for head in heads if isinstance(head, ev.RangeFailed)), None)
    if failure is None:
        return _joined([ranges.popleft() for ranges in by_rank])
    # The rest of the order fails, once no rank digests a block of it any more.
    end = _end_of(failure)
    if any(_end_of(ranges[-1]) < end for ranges in by_rank):
        return None
    for ranges in by_rank:
        while ranges and ranges[0].first_block < end:
            ranges.popleft()
    first = heads[0].first_block
    return replace(failure, first_block=first, num_blocks=end - first)


def _joined(ranges: list[Range]) -> ev.BlockRange:
    first, *others = [each for each in ranges if isinstance(each, ev.BlockRange)]
    if any((each.first_block, _end_of(each)) != (first.first_block, _end_of(first)) for each in others):
        raise ImpossibleEventError(f"the ranks have digested different ranges from {first.first_block} on")
    return replace(first, others=tuple(others))


def _end_of(each: Range) -> int:
    count = len(each.digests) if isinstance(each, ev.BlockRange) else each.num_blocks
    return each.first_block + count


class RankProgress:
    """Owns the ranks' last progress reports. Thread-safe.

    Each report is counted too. A rank's receiving thread sends it behind everything else that the rank was sent, so the
    count shows that this thread works. A rank that has not answered is not asked again: a rank that hangs is not flooded.
    """

    def __init__(self, num_ranks: int) -> None:
        self._lock = threading.Lock()
        self._answered = set(range(num_ranks))
        self._counts = {f"listener on rank {rank}": 0 for rank in range(num_ranks)}

    def to_ask(self) -> set[int]:
        """Return the ranks that owe no report. From now on each of them does."""
        with self._lock:
            ranks = self._answered
            self._answered = set()
            return ranks

    def add(self, rank: int, counts: Mapping[str, int]) -> None:
        """Take a rank's report."""
        with self._lock:
            self._answered.add(rank)
            self._counts[f"listener on rank {rank}"] += 1
            for name, count in counts.items():
                self._counts[f"{name} on rank {rank}"] = count

    def counts(self) -> dict[str, int]:
        """Return every count by the name of its thread."""
        with self._lock:
            return dict(self._counts)


@dataclass
class _Question:
    """A question to all ranks. then: called with why it failed, empty for success. errors: by rank, None for success."""

    then: Callable[[str, float | None], None]
    answers: dict[int, Answer] = field(default_factory=dict)


class RankQuestions:
    """Owns the questions that are open, by key. A question is over when every rank has answered it. Thread-safe.

    The ranks serve a peer's reads, so a peer's link is up only after its session has begun on all ranks. Otherwise the peer
    could show its token to a rank that refuses it.
    """

    def __init__(self, num_ranks: int, send_to_all: Callable[[ToRank], None]) -> None:
        self._num_ranks = num_ranks
        self._send_to_all = send_to_all
        self._lock = threading.Lock()
        self._open: dict[str, _Question] = {}
        self._is_closed = False
        self._num_probes = itertools.count(1)

    def begin(self, token: str, then: Callable[[], None]) -> bool:
        """Have every rank accept a token. Returns False: not from now on, but from when ``then`` is called, in any thread.

        It is not called if the session ends before.
        """
        self._ask(token, BeginSession(token), lambda why_not, _rate: None if why_not else then())
        return False

    def end(self, token: str) -> None:
        """Have every rank reject the token of a link that is gone."""
        with self._lock:
            self._open.pop(token, None)
        self._send_to_all(EndSession(token))

    def probe(self, source: Source, read: Read) -> float | None:
        """Block until all ranks have tried to read a source, and return the rate of the slowest, if they measure.

        Raises TransferError with the ranks that cannot, and why.
        """
        key = f"probe {next(self._num_probes)}"
        outcome = Mailbox[tuple[str, float | None]]()
        self._ask(key, Probe(key, source), lambda *found: outcome.put(found))
        read.when_stopped(partial(self._send_to_all, Stop(key)))
        why_not, rate = outcome.get()
        read.check()
        if why_not:
            raise TransferError(why_not)
        return rate

    def answer(self, rank: int, answer: Answer) -> None:
        """Take a rank's answer."""
        with self._lock:
            question = self._open.get(answer.key)
            if question is None:
                return
            question.answers[rank] = answer
            if len(question.answers) < self._num_ranks:
                return
            del self._open[answer.key]
        answers = sorted(question.answers.items())
        errors = [f"rank {rank}: {each.error}" for rank, each in answers if each.error is not None]
        question.then("; ".join(errors), slowest([each.bytes_per_second for _, each in answers]))

    def close(self) -> None:
        """End all questions, those that will be asked too: the ranks have ended."""
        with self._lock:
            self._is_closed = True
            questions = list(self._open.values())
            self._open.clear()
        for question in questions:
            question.then(_ENDED, None)

    def _ask(self, key: str, message: ToRank, then: Callable[[str, float | None], None]) -> None:
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                self._open[key] = _Question(then)
        if is_closed:
            then(_ENDED, None)
        else:
            self._send_to_all(message)
