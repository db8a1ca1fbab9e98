"""A child process that ends by itself while it is being stopped."""

import asyncio
import os
import sys
from collections.abc import Iterator

import pytest

from contract.identity import Role
from launch.kept_process import ProcessSpec, start_child


@pytest.fixture
def reaped_by_the_loop() -> Iterator[None]:
    """Have the loop's own callback take exit codes, as Python 3.12 does by default; a thread of 3.11 is quicker at times."""
    if sys.version_info >= (3, 12):
        yield
        return
    policy = asyncio.get_event_loop_policy()
    before = policy.get_child_watcher()
    policy.set_child_watcher(asyncio.PidfdChildWatcher())
    yield
    policy.set_child_watcher(before)


def block_until_ended(pid: int) -> None:
    """Wait for the end of a child without taking its exit code, and without a turn of the loop."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.usefixtures("reaped_by_the_loop")
async def test_the_exit_code_of_a_child_that_ends_before_the_second_signal_is_its_own() -> None:
    """A worker that had just drained was reported to have failed with 255."""
    spec = ProcessSpec("both-0", Role.AGGREGATED, lambda _: [sys.executable, "-c", "raise SystemExit(7)"])
    child = await start_child(spec, {})
    at_once = asyncio.Event()
    at_once.set()
    block_until_ended(child.pid)
    assert await child.stop(30.0, at_once) == 7
