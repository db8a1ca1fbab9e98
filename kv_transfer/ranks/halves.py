"""The data halves of several ranks, as the control half sees them: one, with the verbs of ``DataHalf`` and ``Lending``.

Posted jobs, releases and sessions go to every rank; what the ranks report goes up once all have said it.
"""

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from contract.errors import InternalError
from kv_transfer.counters import Counters
from kv_transfer.data.reports import DataReports
from kv_transfer.protocol import events as ev
from kv_transfer.protocol.messages import Offer
from kv_transfer.protocol.orders import CommitJob, PullJob
from kv_transfer.protocol.reads import LeaseName, Source
from kv_transfer.ranks import words
from kv_transfer.ranks.gathering import JobGather, RangeGather, has_failed
from kv_transfer.ranks.lines import RankLines
from kv_transfer.ranks.opening import Opening
from kv_transfer.ranks.progress import RankProgress
from kv_transfer.ranks.sessions import RankSessions
from kv_transfer.ranks.trials import Trials
from kv_transfer.transports.senders import IdleTogether

logger = logging.getLogger(__name__)


class RankDataHalves:
    """Speaks with the ranks' halves; their reports come in the lines' thread. Thread-safe.

    A job that fails on one rank is stopped on the others, and ends when it is terminal on all: until then its blocks
    stay quarantined.
    """

    def __init__(self, num_ranks: int, counters: Counters) -> None:
        self._num_ranks = num_ranks
        self._counters = counters
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._keys: dict[int, str] = {}
        self._jobs, self._ranges = JobGather(num_ranks), RangeGather(num_ranks)
        self._idle = IdleTogether([str(rank) for rank in range(num_ranks)], self._lease_idle)
        self._opening = Opening(num_ranks)
        self._progress = RankProgress(num_ranks)
        self._lines: RankLines | None = None
        self.sessions = RankSessions(num_ranks, self._say)
        self.trials = Trials(num_ranks, partial(next, self._numbers), self._say)

    def attach(self, reports: DataReports, forget: Callable[[Source], None]) -> None:
        """Say who listens, and who forgets a source; called once, before ``connect``."""
        self._reports = reports
        self._forget = forget

    def connect(self, lines: Sequence[Any]) -> None:
        """The sockets to the ranks, in rank order; their halves may not be open yet."""
        self._lines = RankLines(lines, self._hear, self._reports.thread_failed)

    def wait_opened(self, timeout_seconds: float) -> Opening:
        """What all ranks' transports can do, once they have said so. Raises InternalError when one does not."""
        self._opening.wait(timeout_seconds)
        return self._opening

    def offers(self) -> list[Offer]:
        """What a peer can read over, best first: what every rank lends over."""
        return self._opening.offers()

    def post_pull(self, job: PullJob) -> None:
        """Have every rank read its share; ends with PieceVerified, JobFailed or JobStopped."""
        number = self._open(job)
        for rank in range(self._num_ranks):
            self._lines_up.send(rank, words.Pull.of(number, job.in_rank(rank)))
        job.read.when_stopped(partial(self._stop, number))

    def post_commit(self, job: CommitJob) -> None:
        """Have every rank commit; ends with CommitDone, JobFailed or JobStopped."""
        number = self._open(job)
        self._say(words.Commit(number, job.block_ids))
        job.read.when_stopped(partial(self._stop, number))

    def release(self, name: LeaseName) -> None:
        """End a lease on every rank; ``lease_idle`` once nobody reads it on any."""
        self._say(words.Release(name))

    def leave(self, source: Source) -> None:
        """The link of this source is gone."""
        self._forget(source)

    def forget(self, source: Source) -> None:
        """Have the ranks keep nothing of it, once their reads are terminal."""
        self._say(words.Leave(source))

    def stop_trials(self) -> None:
        """Nobody tries a peer any more; what runs fails."""
        self.trials.close()

    def close(self) -> None:
        """Hang up; the ranks have ended, or will. Idempotent."""
        if self._lines is not None:
            self._lines.close()

    def debug_state(self) -> dict[str, Any]:
        """What the ranks were told to do. current: requests whose blocks are moved, with the ranks that are not done."""
        with self._lock:
            uneven = self._ranges.waiting()
            jobs = [
                {"request": self._keys[number], "ranks": ranks}
                for number, ranks in self._jobs.waiting_for().items()
            ]
        return {
            "num_ranks": self._num_ranks,
            "transports": self._opening.readers,
            "current": jobs,
            "uneven_ranges": uneven,
            **({} if self._lines is None else self._lines.debug_state()),
        }

    def progress(self) -> dict[str, int]:
        """See ``ShowsProgress``: what moves KV are threads of the ranks' processes, which report their counts."""
        if self._lines is not None:
            for rank in self._progress.to_ask():
                self._lines.send(rank, words.ShowProgress())
        return self._progress.counts()

    @property
    def _lines_up(self) -> RankLines:
        if self._lines is None:
            raise InternalError("the ranks were spoken to before they were connected")
        return self._lines

    def _say(self, word: words.ToRank) -> None:
        self._lines_up.send_to_all(word)

    def _open(self, job: PullJob | CommitJob) -> int:
        number = next(self._numbers)
        with self._lock:
            self._keys[number] = job.key
            self._jobs.open(number)
        return number

    def _stop(self, number: int) -> None:
        with self._lock:
            must_say = self._jobs.stop(number)
        if must_say:
            self._say(words.Stop(number))

    def _lease_idle(self, name: LeaseName) -> None:
        self._reports.lease_idle(name)

    def _hear(self, rank: int, word: words.FromRank) -> None:
        match word:
            case words.RangeIsReady() | words.RangeHasFailed():
                with self._lock:
                    ranges = self._ranges.add(word.key, rank, word.range)
                for done in ranges:
                    self._reports.send_event(word.key, done)
            case words.Landed() | words.Verified() | words.Failed() | words.Stopped() | words.Committed():
                self._hear_of_job(rank, word)
            case words.LeaseIdle():
                self._idle.report(str(rank), word.name)
            case words.Counted():
                self._counters.merge(word.added)
            case words.SessionBegun() | words.Tried() | words.Opened() | words.Progress():
                self._take_answer(rank, word)
            case words.ThreadFailed():
                failed = InternalError(f"on rank {rank}: {word.error}")
                self._reports.thread_failed(word.thread, failed)

    def _take_answer(
        self, rank: int, word: words.SessionBegun | words.Tried | words.Opened | words.Progress
    ) -> None:
        match word:
            case words.SessionBegun():
                self.sessions.begun(rank, word.token)
            case words.Tried():
                self.trials.tried(rank, word)
            case words.Opened():
                self._opening.add(rank, word)
            case words.Progress():
                self._progress.reported(rank, word.counts)

    def _hear_of_job(self, rank: int, word: words.Landed | words.JobOver) -> None:
        number = word.number
        event = words.event_of(word)
        with self._lock:
            key = self._keys.get(number, "")
            if isinstance(event, ev.PieceLanded):
                outcome: ev.FetchEvent | None = self._jobs.landed(number, rank, event)
            else:
                outcome = self._jobs.over(number, rank, event)
                if outcome is not None:
                    del self._keys[number]
        if has_failed(event):
            self._stop(number)
        if outcome is not None:
            self._reports.fetch_event(key, outcome)
