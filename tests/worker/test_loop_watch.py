"""A service whose event loop hangs ends, though its other threads still run."""

import asyncio
import subprocess
import sys

from worker.loop_watch import EXIT_CODE, LoopWatch


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
