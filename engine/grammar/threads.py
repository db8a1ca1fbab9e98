"""Threads for jobs that cannot be interrupted: each job has a thread of its own, and a few run at a time.

A compilation recurses over references from rule to rule, up to 700 bytes of stack for a byte of text (measured; a schema
of objects within objects), where the usual 8 MiB end the process at 12 kB. So a job has a large stack, whose memory is
returned to the system when the job's thread ends.

Another thread starts them, which has the niceness of the thread of the steps. So that thread waits neither for the start of
a thread nor for a lock that a job with its niceness holds, and no job inherits the niceness of another one.
"""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from contract.errors import InternalError
from engine.mailbox import Mailbox

# A job gives way to the steps of running answers.
_NICENESS = 10

# A job is followed by a rest that is as long as it was, up to this: many jobs leave half of the time to steps.
_MAX_REST_SECONDS = 0.1
# Urgent jobs that run at a time; further ones wait for the end of these.
_MAX_URGENT = 4
# A job that took no longer is not followed by one.
_SHORT_SECONDS = 0.01

Job = Callable[[], None]
Failed = Callable[[InternalError], object]
"""Receives the error with which a job does not run."""


Run = Callable[[list[Job], Job], None]
"""Runs the only job of a list, which it removes from it, and makes the call when that is over."""


@dataclass(frozen=True)
class _Waiting:
    """A job that has not started, alone in a list: the thread that runs it has the only reference to it."""

    jobs: list[Job]
    run: Run
    failed: Failed


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


class _Starter:
    """Owns the thread that starts the others, and what waits for it. ``submit`` and ``close`` are called from any thread."""

    def __init__(self, stack_bytes: int, running: _RunningJobs, clock: Callable[[], float]) -> None:
        self._stack_bytes = stack_bytes
        self._running = running
        self._clock = clock
        self._num_urgent = 0
        self._waiting: deque[_Waiting] = deque()
        self._waiting_urgent: deque[_Waiting] = deque()
        # The attributes above belong to the thread.
        self._inbox = Mailbox[Callable[[], None] | None]()
        self._starting = threading.Lock()
        self._has_thread = False
        self._is_closed = False

    def submit(self, waiting: _Waiting, *, is_urgent: bool) -> None:
        """Start a job, at once or after others. Its niceness is that of the first call, but for what it does itself."""
        queue = self._waiting_urgent if is_urgent else self._waiting
        try:
            if not self._has_thread:  # without the lock, which a thread with the niceness of a job may hold
                with self._starting:
                    if not (self._has_thread or self._is_closed):
                        _start(threading.Thread(target=self._run, name="grammar-starter", daemon=True))
                        self._has_thread = True
        except InternalError as error:
            waiting.failed(error)
            return
        if self._has_thread:  # else it was closed before it had one
            self._inbox.put(partial(queue.append, waiting))

    def close(self) -> None:
        """Start no further job."""
        self._is_closed = True
        self._inbox.put(None)

    def _run(self) -> None:
        while (change := self._inbox.get()) is not None and not self._is_closed:
            change()
            del change  # it may hold a job
            self._start_next()

    def _start_next(self) -> None:
        """Start waiting jobs while there is room."""
        while self._waiting_urgent and self._num_urgent < _MAX_URGENT:
            if self._start_job(self._waiting_urgent.popleft(), self._urgent_ended):
                self._num_urgent += 1
        while self._waiting and self._running.has_room(self._clock()):
            ticket = object()
            if self._start_job(self._waiting.popleft(), partial(self._running.discard, ticket)):
                self._running.add(ticket, self._clock())

    def _urgent_ended(self) -> None:
        self._num_urgent -= 1

    def _start_job(self, waiting: _Waiting, ended: Job) -> bool:
        """Start a job's thread; return False if that is not possible. ended: called in this thread when it has ended."""
        arguments = (waiting.jobs, partial(self._inbox.put, ended))
        thread = threading.Thread(target=waiting.run, args=arguments, name="grammar", daemon=True)
        usual = threading.stack_size(self._stack_bytes)
        try:
            _start(thread)
        except InternalError as error:
            waiting.failed(error)
            return False
        finally:
            # It holds for every thread that this process starts from now on, so it is set back at once.
            threading.stack_size(0 if usual == self._stack_bytes else usual)
        return True


def _start(thread: threading.Thread) -> None:
    try:
        thread.start()
    except RuntimeError as error:
        raise InternalError(f"no thread for a grammar can be started: {error}") from error


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
        self._clock = clock
        self._starter = _Starter(stack_bytes, _RunningJobs(num_running, max_threads, stuck_seconds), clock)

    def submit(self, job: Job, failed: Failed = lambda _: None, *, is_urgent: bool = False) -> None:
        """Run ``job`` in a thread, at once or after others. Does not wait.

        failed: called in another thread if none can be started for the job. is_urgent: it is short, and a client waits for
        it. A few of these run at a time, beside the others, and give way to nothing.
        """
        waiting = _Waiting([job], self._run_urgent if is_urgent else self._run, failed)
        del job
        self._starter.submit(waiting, is_urgent=is_urgent)

    def close(self) -> None:
        """Start no further job."""
        self._starter.close()

    def _run(self, jobs: list[Job], ended: Job) -> None:
        if sys.platform == "linux":  # elsewhere it would count for the whole process
            with suppress(OSError):
                os.nice(_NICENESS)
        begun = self._clock()
        try:
            jobs.pop()()  # the thread's arguments live as long as the thread
        finally:
            self._after_job()
            if (seconds := self._clock() - begun) > _SHORT_SECONDS:
                self._rest(min(seconds, _MAX_REST_SECONDS))
            ended()

    def _run_urgent(self, jobs: list[Job], ended: Job) -> None:
        try:
            jobs.pop()()
        finally:
            ended()
            self._after_job()
