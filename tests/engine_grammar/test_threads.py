"""Jobs that cannot be interrupted do not block others for ever, and leave no large stacks behind."""

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from queue import Queue

import pytest

from contract.errors import InternalError
from engine.grammar.threads import JobThreads
from tests.clock import Clock

WAIT_SECONDS = 240.0
_MOMENT_SECONDS = 0.05
"""The time in which a job begins whose thread has been started."""


class Bench:
    """Threads, and jobs that continue when the test opens the gate."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.threads = JobThreads(2**20, num_running=2, max_threads=4, stuck_seconds=5.0, clock=self.clock)
        self.gate = threading.Event()
        self._has_begun = threading.Semaphore(0)

    def submit(self, count: int = 1, *, is_urgent: bool = False) -> None:
        for _ in range(count):
            self.threads.submit(self._job(), is_urgent=is_urgent)

    def exactly_begun(self, count: int) -> bool:
        """Return True if exactly ``count`` more jobs have begun when all were considered that could start."""
        began = all(self._has_begun.acquire(timeout=WAIT_SECONDS) for _ in range(count))
        is_considered = threading.Event()
        self.threads._starter._inbox.put(is_considered.set)
        assert is_considered.wait(WAIT_SECONDS)
        return began and self.none_begins()

    def none_begins(self) -> bool:
        """Return False if another job begins."""
        return not self._has_begun.acquire(timeout=_MOMENT_SECONDS)

    def _job(self) -> Callable[[], None]:
        def job() -> None:
            self._has_begun.release()
            assert self.gate.wait(WAIT_SECONDS)

        return job


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.gate.set()
    made.threads.close()


def test_only_a_few_jobs_run_at_a_time(bench: Bench) -> None:
    bench.submit(4)
    assert bench.exactly_begun(2)
    bench.gate.set()
    assert bench.exactly_begun(2)


def test_a_few_urgent_jobs_run_beside_the_others_and_as_fast_as_steps(bench: Bench) -> None:
    bench.submit(3)
    assert bench.exactly_begun(2)
    bench.submit(5, is_urgent=True)
    assert bench.exactly_begun(4)
    bench.gate.set()
    assert bench.exactly_begun(2), "the other one, and the urgent one that was too many"
    niceness: Queue[int] = Queue()
    bench.threads.submit(lambda: niceness.put(os.nice(0)), is_urgent=True)
    assert niceness.get(timeout=WAIT_SECONDS) == os.nice(0)


def test_an_urgent_job_that_is_one_too_many_waits_for_urgent_ones_only(bench: Bench) -> None:
    """The fifth of five answers that moved together used to wait for compilations, with their niceness: 0.4 s."""
    bench.submit(2)
    assert bench.exactly_begun(2)
    may_end = threading.Event()
    running = threading.Barrier(5)

    def wait() -> None:
        running.wait(WAIT_SECONDS)
        assert may_end.wait(WAIT_SECONDS)

    for _ in range(4):
        bench.threads.submit(wait, is_urgent=True)
    running.wait(WAIT_SECONDS)
    # The thread that starts them counts the last one when it runs already: only then is there one too many.
    time.sleep(0.05)
    niceness: Queue[int] = Queue()
    bench.threads.submit(lambda: niceness.put(os.nice(0)), is_urgent=True)
    may_end.set()
    # The compilations wait for longer.
    assert niceness.get(timeout=WAIT_SECONDS / 4) == os.nice(0)


@pytest.mark.parametrize("is_urgent", [False, True])
def test_no_job_inherits_the_niceness_of_another_one(bench: Bench, is_urgent: bool) -> None:
    """The threads of compilations used to start the next ones: these had a niceness of 19, and urgent jobs one of 10."""
    usual = os.nice(0)
    niceness: Queue[int] = Queue()

    def note_and_go_on(num_left: int) -> None:
        niceness.put(os.nice(0))
        if num_left:
            bench.threads.submit(partial(note_and_go_on, num_left - 1))
        else:
            bench.threads.submit(lambda: niceness.put(os.nice(0)), is_urgent=is_urgent)

    bench.threads.submit(partial(note_and_go_on, 2))
    found = [niceness.get(timeout=WAIT_SECONDS) - usual for _ in range(4)]
    assert found == [10, 10, 10, 0 if is_urgent else 10]


def test_a_job_that_waited_for_one_with_niceness_has_none_of_it(bench: Bench) -> None:
    """With its four urgent jobs running, the next one was started by whatever ended first, a compilation too."""
    bench.submit(2)
    bench.submit(4, is_urgent=True)
    assert bench.exactly_begun(6)
    niceness: Queue[int] = Queue()
    bench.threads.submit(lambda: niceness.put(os.nice(0)), is_urgent=True)
    bench.gate.set()
    assert niceness.get(timeout=WAIT_SECONDS) == os.nice(0)


def test_a_job_whose_thread_cannot_be_started_fails_and_the_others_go_on() -> None:
    """Nothing has room for this stack. The submitter does not wait for the start, so it gets no error."""
    threads = JobThreads(2**46)
    failed: Queue[InternalError] = Queue()
    for is_urgent in (False, True, False):
        threads.submit(lambda: None, failed.put, is_urgent=is_urgent)
    messages = [failed.get(timeout=WAIT_SECONDS).message for _ in range(3)]
    assert all("no thread for a grammar can be started" in message for message in messages)


def test_hanging_jobs_do_not_block_others_for_ever(bench: Bench) -> None:
    """H1: two compilations that did not end used to block all others."""
    bench.submit(3)
    assert bench.exactly_begun(2)
    bench.clock.now += 6.0
    bench.submit()
    assert bench.exactly_begun(2)


def test_threads_are_bounded(bench: Bench) -> None:
    for seconds, count in ((0.0, 2), (6.0, 2), (6.0, 0)):
        bench.clock.now += seconds
        bench.submit(2)
        assert bench.exactly_begun(count)


def test_no_job_starts_after_close(bench: Bench) -> None:
    bench.submit(3)
    assert bench.exactly_begun(2)
    bench.threads.close()
    bench.submit()
    bench.gate.set()
    assert bench.none_begins()


def test_memory_of_a_job_is_released_before_the_next_call() -> None:
    """H1: the heap is trimmed after the memory of the failed job is free."""
    held, seen, is_over = [threading.Event()], list[bool](), threading.Event()
    watched = weakref.ref(held[0])

    def after_job() -> None:
        seen.append(watched() is None)
        is_over.set()

    threads = JobThreads(2**20, after_job=after_job)
    threads.submit(partial(threading.Event.set, held.pop()))
    assert is_over.wait(10)
    assert seen == [True]


def test_a_long_job_is_followed_by_a_pause() -> None:
    """H1: sixty large grammars, one after the other, used to slow other requests down four times."""
    clock, events, done = Clock(), list[str](), threading.Event()
    threads = JobThreads(
        2**20, num_running=1, clock=clock, rest=lambda seconds: events.append(f"rest {seconds:g}")
    )

    def job(seconds: float) -> None:
        clock.now += seconds
        events.append(f"job {seconds:g}")

    for seconds in (0.05, 3.0, 0.001):
        threads.submit(partial(job, seconds))
    threads.submit(done.set)
    assert done.wait(WAIT_SECONDS)
    assert events == ["job 0.05", "rest 0.05", "job 3", "rest 0.1", "job 0.001"]
