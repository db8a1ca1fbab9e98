"""Threads for jobs that cannot be interrupted: each job has a thread of its own, and a few run at a time.

A compilation recurses over references from rule to rule, up to 700 bytes of stack for a byte of text (measured; a schema
of objects within objects), where the usual 8 MiB end the process at 12 kB. So a job has a large stack, whose memory is
returned to the system when the job's thread ends.
"""

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from contract.errors import InternalError

logger = logging.getLogger(__name__)

_NICENESS = 10
"""A job gives way to the steps of running answers."""

_MAX_REST_SECONDS = 0.1
"""A job is followed by a rest that is as long as it was, up to this: many jobs leave half of the time to steps."""
_MAX_URGENT = 4
"""Urgent jobs that run at a time; others wait like those that are not."""
_SHORT_SECONDS = 0.01
"""A job that took no longer is not followed by one."""

Job = Callable[[], None]


class _RunningJobs:
    """The jobs that run; see JobThreads for the limits. Not thread-safe."""

    def __init__(self, num_running: int, max_threads: int, stuck_seconds: float) -> None:
        self._num_running = num_running
        self._max_threads = max_threads
        self._stuck_seconds = stuck_seconds
        self._started_at: dict[object, float] = {}

    def has_room(self, now: float) -> bool:
        """Return whether another job may start."""
        num_counted = sum(started > now - self._stuck_seconds for started in self._started_at.values())
        return num_counted < self._num_running and len(self._started_at) < self._max_threads

    def add(self, ticket: object, now: float) -> None:
        """Record that a job has started."""
        self._started_at[ticket] = now

    def discard(self, ticket: object) -> None:
        """Record that a job has ended."""
        self._started_at.pop(ticket, None)


class JobThreads:
    """Owns the threads and the queue of jobs. Thread-safe.

    num_running: jobs that run at a time. A job that has run for ``stuck_seconds`` is not counted any more, so that others
    can start, until ``max_threads`` run. after_job: called in the thread of each job when what the job held is released.
    rest: called then, before the next job starts, with the seconds that it is to take.
    """

    def __init__(
        self,
        stack_bytes: int,
        *,
        num_running: int = 2,
        max_threads: int = 8,
        stuck_seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        after_job: Callable[[], object] = lambda: None,
        rest: Callable[[float], object] = time.sleep,
    ) -> None:
        self._rest = rest
        self._after_job = after_job
        self._stack_bytes = stack_bytes
        self._clock = clock
        self._lock = threading.Lock()  # for the four below
        self._waiting: deque[Job] = deque()
        self._running = _RunningJobs(num_running, max_threads, stuck_seconds)
        self._num_urgent = 0
        self._is_closed = False

    def submit(self, job: Job, *, is_urgent: bool = False) -> None:
        """Run ``job`` in a thread, at once or after others. Raises InternalError where no thread can be started.

        is_urgent: it is short, and a client waits for it. A few of these run at once, beside the others, and give way to
        nothing.
        """
        with self._lock:
            if is_urgent and self._num_urgent < _MAX_URGENT and not self._is_closed:
                self._start_thread(self._run_urgent, job)
                self._num_urgent += 1
                return
            self._waiting.append(job)
            try:
                self._start_next()
            except InternalError:
                if job in self._waiting:
                    self._waiting.remove(job)
                raise

    def close(self) -> None:
        """Start no further job."""
        with self._lock:
            self._is_closed = True
            self._waiting.clear()

    def _start_next(self) -> None:
        """Start waiting jobs while there is room. Called with the lock held."""
        while self._waiting and not self._is_closed and self._running.has_room(self._clock()):
            ticket = object()
            self._start_thread(partial(self._run, ticket=ticket), self._waiting[0])
            self._waiting.popleft()
            self._running.add(ticket, self._clock())

    def _start_thread(self, run: Callable[[list[Job]], None], job: Job) -> None:
        thread = threading.Thread(target=run, args=([job],), name="grammar", daemon=True)
        usual = threading.stack_size(self._stack_bytes)
        try:
            thread.start()
        except RuntimeError as error:
            raise InternalError(
                f"no thread for a grammar can be started with a stack of {self._stack_bytes} bytes: {error}"
            ) from error
        finally:
            threading.stack_size(0 if usual == self._stack_bytes else usual)

    def _run(self, jobs: list[Job], ticket: object) -> None:
        if sys.platform == "linux":  # elsewhere it would count for the whole process
            with suppress(OSError):
                os.nice(_NICENESS)
        job = jobs.pop()  # the thread's arguments live as long as the thread
        begun = self._clock()
        try:
            job()
        finally:
            with self._lock:  # submit() holds the lock, and its own reference to the job, until it is done
                pass
            del job
            self._after_job()
            if (seconds := self._clock() - begun) > _SHORT_SECONDS:
                self._rest(min(seconds, _MAX_REST_SECONDS))
            with self._lock:
                self._running.discard(ticket)
                self._start_next_if_possible()

    def _run_urgent(self, jobs: list[Job]) -> None:
        try:
            jobs.pop()()
        finally:
            with self._lock:  # as above
                self._num_urgent -= 1
            self._after_job()

    def _start_next_if_possible(self) -> None:
        try:
            self._start_next()
        except InternalError as error:  # the next submit tries again
            logger.error("%s", error.message)
