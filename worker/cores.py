"""The cores that a worker runs on, and its priority there against other processes."""

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from contract.errors import SettingError

_GROUP = Path("/proc/self/autogroup")
_TRIES = 20
_PAUSE_SECONDS = 0.1
_MAX_DIGITS = 6
"""Limit of a core number's length: a range is expanded before it is compared with the existing cores."""


def set_niceness(nice: int) -> None:
    """Lower the priority of this thread and of what it starts later by ``nice``, as nice(1) does; 0 changes nothing.

    Linux may weigh whole sessions against each other, and apply niceness only within a session (autogroup in sched(7)): a
    session that consists of this process is lowered as a whole. Does nothing on systems without niceness.
    """
    if not nice or not hasattr(os, "nice"):
        return
    os.nice(nice)
    if os.getsid(0) != os.getpid():
        return
    with suppress(OSError):
        # Linux accepts one such change per 0.1 s over all processes, except from root.
        for _ in range(_TRIES):
            with suppress(BlockingIOError):
                _GROUP.write_text(str(nice))
                return
            time.sleep(_PAUSE_SECONDS)


def parse_cores(text: str) -> tuple[int, ...]:
    """Return the cores of a list in taskset's format ("0-3,8"), in order, each once. Raises ValueError for other text."""
    cores: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if max(len(first), len(last)) > _MAX_DIGITS:
            raise ValueError(f"cores is {text[:80]!r}; no machine has a core of that number")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise ValueError(f"cores is {text!r}; give numbers and ranges, as 0-3,8")
        cores += range(int(first), int(last or first) + 1)
    return tuple(dict.fromkeys(cores))


def show_cores(cores: Iterable[int]) -> str:
    """Return the text that ``parse_cores`` reads."""
    return ",".join(map(str, cores))


def run_on(cores: tuple[int, ...]) -> None:
    """Bind this process, and the threads and processes that it starts later, to these cores; empty: do nothing.

    Raises SettingError if the system cannot do that, or if this process may not use one of the cores.
    """
    if not cores:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise SettingError("cores: this system cannot bind a process to cores; leave it unset", param="cores")
    allowed = os.sched_getaffinity(0)
    if missing := sorted(set(cores) - allowed):
        raise SettingError(
            f"cores: core {missing[0]} is not available to this process, which may use {show_cores(sorted(allowed))}",
            param="cores",
        )
    os.sched_setaffinity(0, cores)
