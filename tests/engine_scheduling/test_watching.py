"""The signs that an engine works: counts that grow with the work, and time on a processor. Nothing else is one."""

import os
import signal
import subprocess
import sys

import hypothesis.strategies as st
from hypothesis import given

from engine.hosting.watching import (
    COMPUTING_FACTOR,
    STEP_LOOP,
    EngineWatch,
    LivenessTimeouts,
    processor_nanoseconds,
    queued_nanoseconds,
)

TIMEOUTS = LivenessTimeouts(stopped_seconds=3.0, hung_seconds=30.0)
SECOND = 10**9
OTHER = "thread that publishes KV"


def watched(now: float = 0.0) -> EngineWatch:
    watch = EngineWatch(TIMEOUTS, now)
    watch.ran(0, now)
    watch.on_answer({STEP_LOOP: 0, OTHER: 0}, now)
    return watch


def test_a_process_that_does_not_run_counts_as_stopped() -> None:
    """P4: no time on a processor for the patience of a peer."""
    watch = watched()
    watch.ran(1, 1.0)
    watch.on_answer({STEP_LOOP: 1, OTHER: 1}, 1.0)
    watch.ran(1, 3.9)
    assert watch.complaint(3.9) is None
    assert watch.complaint(3.9, share=0.5) is not None
    watch.ran(1, 4.0)
    assert "has not run for 3.0 s" in str(watch.complaint(4.0))


def test_a_process_that_answers_but_makes_no_progress_hangs() -> None:
    """P4: the thread that answers is not the one that works."""
    watch = watched()
    for now in range(1, 30):
        assert watch.complaint(now) is None
        watch.ran(now, now)
        watch.on_answer({STEP_LOOP: 0, OTHER: now}, now)
    watch.ran(30, 30)
    assert watch.complaint(30) == "its step loop has made no progress for 30.0 s"


def test_a_long_step_that_computes_is_left_alone_and_another_thread_is_not() -> None:
    """P4: a slow machine is no fault; but only the step loop may compute for so long."""
    watch, other = watched(), watched()
    for now in range(1, 31 * COMPUTING_FACTOR):
        if now < 30 * COMPUTING_FACTOR:
            assert watch.complaint(now) is None
        for one, moving in ((watch, OTHER), (other, STEP_LOOP)):
            one.ran(now * SECOND // 10, now)
            one.on_answer({STEP_LOOP: 0, OTHER: 0, moving: now}, now)
        if now == 30:
            assert "thread that publishes KV has made no progress" in str(other.complaint(now))
    assert "its step loop has made no progress" in str(watch.complaint(31 * COMPUTING_FACTOR))


def test_a_watch_that_was_away_itself_begins_anew() -> None:
    """P4: a machine that slept, or a whole worker that was stopped, has not lost its engine."""
    watch = watched()
    watch.was_away(100.0)
    watch.ran(0, 100.0)
    assert watch.complaint(102.9) is None
    assert watch.complaint(103.0) is not None


def test_where_time_on_a_processor_is_not_counted_silence_counts() -> None:
    """P4: other systems than Linux."""
    watch = EngineWatch(TIMEOUTS, 0.0)
    watch.ran(None, 0.0)
    watch.on_answer({STEP_LOOP: 0}, 0.0)
    watch.ran(None, 29.0)
    assert watch.complaint(29.0) is None
    watch.ran(None, 30.0)
    assert watch.complaint(30.0) == "its process has not answered for 30.0 s"


@given(
    looks=st.lists(
        st.tuples(
            st.floats(0.01, 1.0),
            st.booleans(),
            st.booleans(),
        ),
        max_size=80,
    )
)
def test_a_complaint_comes_when_and_only_when_signs_of_life_are_missing(
    looks: list[tuple[float, bool, bool]],
) -> None:
    """P4: the verdict is that of a plain model, whatever the order of signs."""
    watch, now, count, runtime = watched(), 0.0, 0, 0
    moved_at = ran_at = 0.0
    for seconds, moves, runs in looks:
        now += seconds
        if runs or moves:
            runtime, ran_at = runtime + 1, now
        watch.ran(runtime, now)
        if moves:
            count, moved_at = count + 1, now
        watch.on_answer({STEP_LOOP: count}, now)
        is_stopped, hangs = now - ran_at >= 3.0, now - moved_at >= 30.0
        watch.on_answer({OTHER: count + runtime}, now)
        has_other = now - max(moved_at, ran_at) >= 30.0
        assert (watch.complaint(now) is not None) is (is_stopped or hangs or has_other)


def test_a_stopped_process_has_no_time_on_a_processor_and_a_child_counts() -> None:
    """P4: what is measured is the whole tree, and stands still while all of it is stopped."""
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        before = processor_nanoseconds(os.getpid())
        assert before is not None
        # the start of the child may have taken longer than this already
        later = (processor_nanoseconds(child.pid) or 0) + SECOND // 20
        while (processor_nanoseconds(child.pid) or 0) < later:
            pass
        assert (processor_nanoseconds(os.getpid()) or 0) > before
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        stopped = [processor_nanoseconds(child.pid) for _ in range(100)]
        assert len(set(stopped)) == 1
    finally:
        child.kill()
        child.wait()
    assert processor_nanoseconds(child.pid) is None


def test_a_starved_process_is_slow_and_a_blocked_one_hangs() -> None:
    """B13: at a load of 20 on two cores a healthy thread makes no progress for long, and waits in the queue meanwhile."""
    starved, blocked, spinning = watched(), watched(), watched()
    for now in range(1, 31):
        starved.ran(now * SECOND // 2, now, queued=now * SECOND // 2)
        blocked.ran(now * SECOND // 100, now, queued=now * SECOND // 100)
        spinning.ran(now * SECOND, now)
        for one in (starved, blocked, spinning):
            one.on_answer({STEP_LOOP: now, OTHER: 0}, now)
    assert starved.complaint(30) is None
    assert blocked.complaint(30) == spinning.complaint(30) == f"its {OTHER} has made no progress for 30.0 s"
    late = 30 * COMPUTING_FACTOR
    starved.ran(late * SECOND // 2, late, queued=late * SECOND // 2)
    assert "no progress" in str(starved.complaint(late))


def test_two_processes_on_one_core_wait_in_its_queue() -> None:
    """B13: the time that is measured is the wait for a processor, not the sleep of an idle process."""
    core = str(min(os.sched_getaffinity(0)))
    program = f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    children = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(2)]
    idle = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        while min(queued_nanoseconds(child.pid) for child in children) < SECOND // 5:
            pass
        before = queued_nanoseconds(idle.pid)
        while min(queued_nanoseconds(child.pid) for child in children) < SECOND // 2:
            pass
        assert queued_nanoseconds(idle.pid) - before < SECOND // 5
    finally:
        for child in (*children, idle):
            child.kill()
            child.communicate()
