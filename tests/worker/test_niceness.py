"""A worker sets its niceness."""

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest

from worker import cores
from worker.cores import set_niceness

_GROUP = Path("/proc/self/autogroup")
SPAWN = multiprocessing.get_context("spawn")


def _group_nice() -> int | None:
    """Return the session's niceness; None where the system has no session niceness or does not let us set it."""
    text = _GROUP.read_text() if os.access(_GROUP, os.W_OK) else ""
    return int(text.rpartition(" ")[2]) if text else None


def _after(nice: int, has_own_session: bool, found: Any) -> None:
    if has_own_session:
        os.setsid()
    before = os.getpriority(os.PRIO_PROCESS, 0), _group_nice()
    set_niceness(nice)
    child = SPAWN.Queue()
    process = SPAWN.Process(target=_own, args=(child,))
    process.start()
    inherited = child.get(timeout=60)
    process.join()
    found.put((before, (os.getpriority(os.PRIO_PROCESS, 0), _group_nice()), inherited))


def _own(found: Any) -> None:
    found.put(os.getpriority(os.PRIO_PROCESS, 0))


def test_a_refused_change_of_niceness_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several prefill workers start at once, and the system refuses a second change within 0.1 s."""
    pauses: list[float] = []
    written: list[str] = []

    class Group:
        @staticmethod
        def write_text(text: str) -> None:
            if len(pauses) < 2:
                raise BlockingIOError
            written.append(text)

    monkeypatch.setattr(cores, "_GROUP", Group)
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setattr(os, "nice", lambda _: 0)
    monkeypatch.setattr(os, "getsid", lambda _: os.getpid())
    set_niceness(4)
    assert (written, len(pauses)) == (["4"], 2)


@pytest.mark.parametrize("nice", [0, 3])
@pytest.mark.parametrize("has_own_session", [True, False])
def test_the_niceness_of_a_process_and_of_its_own_session_is_set(nice: int, has_own_session: bool) -> None:
    """Child processes inherit it; a session shared with other processes is unchanged."""
    found = SPAWN.Queue()
    process = SPAWN.Process(target=_after, args=(nice, has_own_session, found))
    process.start()
    (priority, group), after, inherited = found.get(timeout=60)
    process.join()
    lowered = min(priority + nice, 19)
    moved = nice if nice and has_own_session and group is not None else group
    assert after == (lowered, moved)
    assert inherited == lowered
