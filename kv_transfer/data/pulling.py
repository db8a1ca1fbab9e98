"""The threads that read from peers: one per source, so that a peer that is stuck holds up nobody but itself."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty

from engine.mailbox import Mailbox
from kv_transfer.protocol.orders import PullJob
from kv_transfer.protocol.reads import Source


@dataclass(eq=False)
class _Lane:
    """The reads from one source, in the order in which they were posted; ``current`` is the one that runs.

    wake: a token for everything that the thread may wait for; one lane's work wakes no other one.
    """

    source: Source
    thread: threading.Thread
    jobs: deque[PullJob] = field(default_factory=deque)
    current: PullJob | None = None
    is_ending: bool = False
    wake: Mailbox[None] = field(default_factory=Mailbox)


class PullThreads:
    """Owns a thread for each source that is read from. Thread-safe.

    work: carries a job out and reports its end; called in the source's thread. forget: called once a source will never
    be read from again. on_bug: told what ended a thread early. idle_seconds: how long a thread without a job is kept.
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
        """Queue a read behind the others from its source. False: it will not be carried out.

        That is so after ``stop``, and where the system gives no further thread.
        """
        with self._lock:
            lane = None if self._is_closed else self._open_lanes.get(job.source) or self._open(job.source)
            if lane is None:
                return False
            lane.jobs.append(job)
        lane.wake.put(None)
        return True

    def leave(self, source: Source) -> None:
        """The link is gone: end the source's thread once what it was given is terminal."""
        with self._lock:
            lane = self._open_lanes.pop(source, None)
            if lane is not None:
                lane.is_ending = True
                lane.wake.put(None)
                return
        self._forget(source)

    def stop(self) -> None:
        """Take no further read and stop the others. Does not block; idempotent."""
        with self._lock:
            self._is_closed = True
            for lane in self._lanes:
                lane.is_ending = True
                lane.wake.put(None)
            jobs = [job for lane in self._lanes for job in (lane.current, *lane.jobs) if job is not None]
        for job in jobs:
            job.read.stop()

    def join(self) -> None:
        """After ``stop``: wait until every read is terminal and its thread has ended."""
        with self._lock:
            lanes = list(self._lanes)
        for lane in lanes:
            lane.thread.join()

    @property
    def num_threads(self) -> int:
        """How many sources have a thread now."""
        with self._lock:
            return len(self._lanes)

    @property
    def num_queued(self) -> int:
        """Reads that have not begun."""
        with self._lock:
            return sum(len(lane.jobs) for lane in self._lanes)

    @property
    def current_keys(self) -> list[str]:
        """The requests that are being read for."""
        with self._lock:
            return [lane.current.key for lane in self._lanes if lane.current is not None]

    def _open(self, source: Source) -> _Lane | None:
        name = f"kv-pull-{source.worker_id}"
        lane = _Lane(source, threading.Thread(name=name, daemon=True, target=lambda: self._run(lane)))
        try:
            lane.thread.start()
        except RuntimeError:  # no further thread can be had
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
        except Exception as error:  # noqa: BLE001 - the boundary of the thread: the connector must hear of its end
            self._on_bug(error)
        finally:
            with self._lock:
                self._remove(lane)

    def _next(self, lane: _Lane) -> PullJob | None:
        """Block for the next read; None: the lane is closed to new ones and its thread ends."""
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
