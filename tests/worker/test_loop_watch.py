"""A service whose event loop hangs ends, though its other threads still run."""

import asyncio
import subprocess
import sys
import threading

from worker.loop_watch import EXIT_CODE, LoopProgress, LoopWatch, queued_nanoseconds_by_thread


def test_a_process_whose_event_loop_hangs_ends_with_its_reason() -> None:
    """P4: nothing else would detect it; gRPC's own threads answer pings."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tests.worker.hanging_loop_program"],
        capture_output=True,
        timeout=120,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path)},
        check=False,
    )
    assert (done.returncode, done.stdout) == (EXIT_CODE, "worked\n")
    assert "the event loop has done nothing for" in done.stderr
    assert "hanging_loop_program.py" in done.stderr, "where each thread stood"


async def test_a_loop_that_turns_is_left_alone_and_a_watch_ends_with_its_block() -> None:
    """P4: a busy loop is not a hang."""
    ended: list[str] = []
    with LoopWatch(0.2, lambda: ended.append("ended")) as watch:
        for _ in range(40):
            await asyncio.sleep(0.02)
    watch._thread.join(30)
    assert not watch._thread.is_alive()
    assert ended == []


def looked(queued_share: float, seconds: float) -> float | None:
    """Return the verdict on a loop that does nothing, while another thread waits for a processor for a share of the time."""
    progress = LoopProgress(30.0, now=0.0)
    found = None
    for second in range(int(seconds) + 1):
        queued = {"1": 5 * 10**9, "2": int(queued_share * second * 1e9)}
        found = found or progress.look(float(second), 0, queued)
    return found


def test_a_loop_without_a_processor_is_no_hang() -> None:
    """B13: at a load of 20 on two cores, a healthy loop may not turn for 30 s; one that is blocked does not queue."""
    assert looked(0.9, 100) is None
    assert looked(0.9, 700) == 600.0
    assert looked(0.0, 100) == 30.0
    assert looked(0.1, 100) == 30.0


def test_a_pause_of_the_whole_process_proves_nothing() -> None:
    progress = LoopProgress(30.0, now=0.0)
    assert progress.look(3.0, 0, {}) is None
    assert progress.look(1000.0, 0, {}) is None
    assert progress.look(1003.0, 0, {}) is None


def test_the_waits_of_this_process_are_read_and_grow() -> None:
    before = queued_nanoseconds_by_thread()
    assert str(threading.get_native_id()) in before
    after = queued_nanoseconds_by_thread()
    assert all(after.get(name, value) >= value for name, value in before.items())
