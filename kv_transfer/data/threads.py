"""The threads of the data half, and the reports that they make."""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import Empty
from typing import Protocol

from engine.mailbox import Mailbox
from kv_transfer.protocol import events as ev
from kv_transfer.protocol.reads import LeaseName, Read, ReadRequest, Source


class DataReports(Protocol):
    """Reports of the data half to the control half; called from any thread."""

    def send_event(self, key: str, event: ev.SendEvent) -> None:
        """Report an event of a lent request."""

    def end_expected(self, key: str, seconds: float) -> None:
        """Report that a lent request's transfer will be complete in about ``seconds``."""

    def fetch_event(self, key: str, event: ev.FetchEvent) -> None:
        """Report an event of a fetched request; every posted job ends with exactly one terminal event."""

    def lease_idle(self, name: LeaseName) -> None:
        """Report that a revoked lease has no reader any more."""

    def thread_failed(self, thread: str, error: BaseException) -> None:
        """Report a bug that ended a thread: what it served cannot end properly any more."""


class JobThread(threading.Thread):
    """A thread that runs jobs in the order in which they are posted, until None is. on_bug: called with what ended it early.

    may_end: called if no job is posted for ``idle_seconds``, in the thread, which ends if this returns True.
    """

    def __init__(
        self,
        name: str,
        on_bug: Callable[[BaseException], None],
        idle_seconds: float | None = None,
        may_end: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._on_bug = on_bug
        self._idle_seconds = idle_seconds
        self._may_end = may_end
        self._jobs = Mailbox[Callable[[], None] | None]()
        self._num_done = 0

    def post(self, job: Callable[[], None] | None) -> None:
        """Queue a job, or the end of the thread. Does not block."""
        self._jobs.put(job)

    def progress(self) -> int:
        """Return the number of finished jobs, and post one more if none waits: the number moves unless a job is stuck."""
        if not self._jobs.num_waiting:
            self._jobs.put(lambda: None)
        return self._num_done

    @property
    def num_queued(self) -> int:
        """Number of jobs that have not begun."""
        return self._jobs.num_waiting

    def run(self) -> None:
        """Run the jobs; called in the thread."""
        try:
            while (job := self._next()) is not None:
                job()
                self._num_done += 1
        except Exception as error:  # noqa: BLE001 - the boundary of the thread: the connector must end with it
            self._on_bug(error)

    def _next(self) -> Callable[[], None] | None:
        while True:
            try:
                return self._jobs.get(self._idle_seconds)
            except Empty:
                if self._may_end():
                    return None


@dataclass
class _Turn:
    """The right to read from a source, which one thread has at a time.

    num_jobs: those that have not ended. waiting: those that were posted and have not begun, with their requests.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    num_jobs: int = 0
    waiting: deque[tuple[Read, ReadRequest | None]] = field(default_factory=deque)


class PullThreads:
    """Owns a thread for each source that is read or probed, so that a stuck peer delays no other. Thread-safe.

    The jobs of a source run one after another, in the order in which they come, also those of ``claim``.

    ask: called with the requests of a source's next fetches, in order, while none of its jobs runs; it does not block.
    forget: called once a source will never be read from again. on_bug: called with what ended a thread early. idle_seconds:
    how long a thread without a job is kept.
    """

    def __init__(
        self,
        forget: Callable[[Source], None],
        on_bug: Callable[[BaseException], None],
        idle_seconds: float = 60.0,
        ask: Callable[[Source, Sequence[ReadRequest]], None] = lambda _source, _requests: None,
    ) -> None:
        self._forget = forget
        self._ask = ask
        self._on_bug = on_bug
        self._idle_seconds = idle_seconds
        self._lock = threading.Lock()
        self._open: dict[Source, JobThread] = {}
        # Also those whose link is gone, or that have just ended: ``join`` waits for all.
        self._threads: list[JobThread] = []
        self._running: dict[int, tuple[str, Read]] = {}
        """Keys and reads, by the identifier of the thread that reads."""
        self._turns: defaultdict[Source, _Turn] = defaultdict(_Turn)
        self._is_closed = False

    def post(
        self,
        source: Source,
        key: str,
        read: Read,
        work: Callable[[], None],
        request: ReadRequest | None = None,
    ) -> bool:
        """Queue ``work``, which executes ``read`` and reports its end; called in the source's thread.

        request: that of the only fetch which ``work`` makes, if it is known. False: it will not run, after ``stop`` or when
        no thread can be started.
        """
        with self._lock:
            thread = None if self._is_closed else self._open.get(source) or self._start(source)
            if thread is not None:
                turn = self._turns[source]
                turn.num_jobs += 1
                turn.waiting.append((read, request))
                thread.post(partial(self._wait_and_execute, turn, key, read, work))
        # Only while no job of the source runs, whose thread would use the same connection.
        if thread is not None and request is not None and turn.lock.acquire(blocking=False):
            try:
                self._ask(source, self.following(source))  # before the thread has been woken
            finally:
                turn.lock.release()
        return thread is not None

    def claim(
        self, source: Source, key: str, read: Read, work: Callable[[], None]
    ) -> Callable[[], None] | None:
        """Return a call that runs ``work`` in the thread of its caller, who must make it soon: later jobs wait for it.

        None if other jobs of the source have not ended.
        """
        with self._lock:
            turn = self._turns[source]
            if self._is_closed or turn.num_jobs:
                return None
            turn.num_jobs += 1
            turn.lock.acquire()  # the job before has been counted as ended within the lock, and frees it now
        return partial(self._execute, turn, key, read, work)

    def following(self, source: Source) -> list[ReadRequest]:
        """Return the requests of the source's next fetches, in order, up to one that is not known yet."""
        found: list[ReadRequest] = []
        with self._lock:
            turn = self._turns.get(source)
            for read, request in turn.waiting if turn else ():
                if request is None:
                    break
                if not read.is_stopped:
                    found.append(request)
        return found

    def leave(self, source: Source) -> None:
        """End the thread of a source whose link is gone, once its reads are terminal."""
        with self._lock:
            self._turns.pop(source, None)
            if source in self._open:
                self._end(source)
                return
        self._forget(source)

    def stop(self) -> None:
        """Reject further reads, stop all others, and end the threads. Does not block; idempotent."""
        with self._lock:
            self._is_closed = True
            for source in list(self._open):
                self._end(source)
            running = list(self._running.values())
        for _, read in running:
            read.stop()

    def join(self) -> None:
        """Wait, after ``stop``, until every read is terminal and its thread has ended."""
        for thread in self._threads:
            thread.join()
        # Jobs of ``claim`` run in other threads.
        for turn in list(self._turns.values()):
            with turn.lock:
                pass

    @property
    def num_queued(self) -> int:
        """Number of reads that have not begun."""
        with self._lock:
            return sum(thread.num_queued for thread in self._threads)

    @property
    def current_keys(self) -> list[str]:
        """Keys of the requests that are being read."""
        with self._lock:
            return [key for key, _ in self._running.values()]

    def _start(self, source: Source) -> JobThread | None:
        name = f"kv-pull-{source.worker_id}"
        thread = JobThread(name, self._on_bug, self._idle_seconds, lambda: self._may_end(source, thread))
        try:
            thread.start()
        except RuntimeError:  # the system cannot start another thread
            return None
        self._open[source] = thread
        self._threads = [each for each in self._threads if each.is_alive()] + [thread]
        return thread

    def _wait_and_execute(self, turn: _Turn, key: str, read: Read, work: Callable[[], None]) -> None:
        turn.lock.acquire()
        with self._lock:
            turn.waiting.popleft()
        self._execute(turn, key, read, work)

    def _execute(self, turn: _Turn, key: str, read: Read, work: Callable[[], None]) -> None:
        """Run a job that has its turn, and end the turn."""
        thread = threading.get_ident()
        try:
            with self._lock:
                self._running[thread] = (key, read)
            if self._is_closed:  # it was queued when the others were stopped
                read.stop()
            work()
        finally:
            with self._lock:
                del self._running[thread]
                turn.num_jobs -= 1
            turn.lock.release()

    def _end(self, source: Source) -> None:
        thread = self._open.pop(source)
        thread.post(partial(self._forget, source))
        thread.post(None)

    def _may_end(self, source: Source, thread: JobThread) -> bool:
        """Let an idle thread end, unless something was posted meanwhile. Its source may be read again by another one."""
        with self._lock:
            if thread.num_queued:
                return False
            del self._open[source]
            return True
