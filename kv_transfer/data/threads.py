"""The threads of the data half, and the reports that they make."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty
from typing import Protocol

from engine.mailbox import Mailbox
from kv_transfer.protocol import events as ev
from kv_transfer.protocol.orders import PullJob
from kv_transfer.protocol.reads import LeaseName, Source


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


class DataThread:
    """A thread that runs jobs in the order in which they are posted. on_bug: called with what ended it early."""

    def __init__(self, on_bug: Callable[[BaseException], None]) -> None:
        self._on_bug = on_bug
        self._jobs = Mailbox[Callable[[], None] | None]()
        self._thread = threading.Thread(target=self._run, name="kv-data", daemon=True)
        self._num_done = 0
        self._is_counting = False

    def start(self) -> None:
        """Start the thread; called once."""
        self._thread.start()

    def post(self, job: Callable[[], None]) -> None:
        """Queue a job. Does not block."""
        self._jobs.put(job)

    def stop(self) -> None:
        """Wait until the posted jobs are done and the thread has ended. Idempotent."""
        self._jobs.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def progress(self) -> int:
        """Return the number of finished jobs, and post one more, so that the number moves unless the thread is stuck."""
        if not self._is_counting:
            self._is_counting = True
            self._jobs.put(self._count)
        return self._num_done

    @property
    def num_queued(self) -> int:
        """Number of jobs that have not begun."""
        return self._jobs.num_waiting

    @property
    def is_alive(self) -> bool:
        """True while the thread runs."""
        return self._thread.is_alive()

    def _count(self) -> None:
        self._is_counting = False

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                job()
                self._num_done += 1
        except Exception as error:  # noqa: BLE001 - the boundary of the thread: the connector must end with it
            self._on_bug(error)


@dataclass(eq=False)
class _Lane:
    """The reads from one source, in the order in which they were posted. wake: a token for each change of the lane."""

    source: Source
    thread: threading.Thread
    jobs: deque[PullJob] = field(default_factory=deque)
    current: PullJob | None = None
    is_ending: bool = False
    wake: Mailbox[None] = field(default_factory=Mailbox)


class PullThreads:
    """Owns a thread for each source that is read from, so that a stuck peer delays no other. Thread-safe.

    work: executes a job and reports its end; called in the source's thread. forget: called once a source will never be read
    from again. on_bug: called with what ended a thread early. idle_seconds: how long a thread without a job is kept.
    """

    def __init__(
        self,
        work: Callable[[PullJob], None],
        forget: Callable[[Source], None],
        on_bug: Callable[[BaseException], None],
        idle_seconds: float = 60.0,
    ) -> None:
        self._work = work
        self._forget = forget
        self._on_bug = on_bug
        self._idle_seconds = idle_seconds
        self._lock = threading.Lock()
        self._open_lanes: dict[Source, _Lane] = {}
        self._lanes: set[_Lane] = set()
        self._is_closed = False

    def post(self, job: PullJob) -> bool:
        """Queue a read from its source. False: it will not run, after ``stop`` or when no thread can be started."""
        with self._lock:
            lane = None if self._is_closed else self._open_lanes.get(job.source) or self._open(job.source)
            if lane is None:
                return False
            lane.jobs.append(job)
        lane.wake.put(None)
        return True

    def leave(self, source: Source) -> None:
        """End the thread of a source whose link is gone, once its reads are terminal."""
        with self._lock:
            lane = self._open_lanes.pop(source, None)
            if lane is not None:
                lane.is_ending = True
                lane.wake.put(None)
                return
        self._forget(source)

    def stop(self) -> None:
        """Reject further reads and stop the others. Does not block; idempotent."""
        with self._lock:
            self._is_closed = True
            for lane in self._lanes:
                lane.is_ending = True
                lane.wake.put(None)
            jobs = [job for lane in self._lanes for job in (lane.current, *lane.jobs) if job is not None]
        for job in jobs:
            job.read.stop()

    def join(self) -> None:
        """Wait, after ``stop``, until every read is terminal and its thread has ended."""
        with self._lock:
            lanes = list(self._lanes)
        for lane in lanes:
            lane.thread.join()

    @property
    def num_threads(self) -> int:
        """Number of sources that have a thread."""
        with self._lock:
            return len(self._lanes)

    @property
    def num_queued(self) -> int:
        """Number of reads that have not begun."""
        with self._lock:
            return sum(len(lane.jobs) for lane in self._lanes)

    @property
    def current_keys(self) -> list[str]:
        """Keys of the requests that are being read."""
        with self._lock:
            return [lane.current.key for lane in self._lanes if lane.current is not None]

    def _open(self, source: Source) -> _Lane | None:
        name = f"kv-pull-{source.worker_id}"
        lane = _Lane(source, threading.Thread(name=name, daemon=True, target=lambda: self._run(lane)))
        try:
            lane.thread.start()
        except RuntimeError:  # the system cannot start another thread
            return None
        self._open_lanes[source] = lane
        self._lanes.add(lane)
        return lane

    def _run(self, lane: _Lane) -> None:
        try:
            while (job := self._next(lane)) is not None:
                self._work(job)
            if lane.is_ending:
                self._forget(lane.source)
        except Exception as error:  # noqa: BLE001 - the boundary of the thread: the connector must end with it
            self._on_bug(error)
        finally:
            with self._lock:
                self._remove(lane)

    def _next(self, lane: _Lane) -> PullJob | None:
        """Wait for the next read. None: the lane is closed, and its thread must end."""
        is_idle = False
        while True:
            with self._lock:
                lane.current = lane.jobs.popleft() if lane.jobs else None
                if lane.current is not None:
                    return lane.current
                if lane.is_ending or is_idle:
                    self._remove(lane)
                    return None
            try:
                lane.wake.get(self._idle_seconds)
            except Empty:
                is_idle = True

    def _remove(self, lane: _Lane) -> None:
        if self._open_lanes.get(lane.source) is lane:
            del self._open_lanes[lane.source]
        self._lanes.discard(lane)
