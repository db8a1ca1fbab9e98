"""Scripted children for the supervisor's tests, and a wait for the end of any process."""

import os
import select
import sys
from collections.abc import Callable, Mapping

from contract.identity import Role
from launch.kept_process import Facts, ProcessSpec

PATIENCE_SECONDS = 60.0


def spec(
    name: str,
    behaviour: str | Callable[[Mapping[str, Facts]], str] = "well",
    *,
    needs: tuple[str, ...] = (),
    note: Callable[[Mapping[str, Facts]], str] = lambda _: "",
) -> ProcessSpec:
    """Describe a child named like a worker of `up` ("decode-0" has the role decode); ``note`` is added to its facts."""

    def command(known: Mapping[str, Facts]) -> list[str]:
        how = behaviour if isinstance(behaviour, str) else behaviour(known)
        return [sys.executable, "-m", "tests.launch.child_program", how, "--note", note(known)]

    return ProcessSpec(name, Role(name.partition("-")[0]), command, needs=needs)


def wait_gone(pid: int) -> bool:
    """Block until process ``pid`` has ended; return False if it still runs after PATIENCE_SECONDS."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with os.fdopen(handle) as opened:
        poller = select.poll()
        poller.register(opened, select.POLLIN)
        return bool(poller.poll(PATIENCE_SECONDS * 1000))
