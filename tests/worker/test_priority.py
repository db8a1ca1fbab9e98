"""A worker gives way as far as it is told."""

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest

from worker import priority
from worker.priority import give_way

_GROUP = Path("/proc/self/autogroup")
SPAWN = multiprocessing.get_context("spawn")


def _group_nice() -> int | None:
    """None where the system weighs no sessions or lets nobody say how, and in a session from before it weighed them."""
    text = _GROUP.read_text() if os.access(_GROUP, os.W_OK) else ""
    return int(text.rpartition(" ")[2]) if text else None


def _after(nice: int, has_own_session: bool, found: Any) -> None:
    if has_own_session:
        os.setsid()
    before = os.getpriority(os.PRIO_PROCESS, 0), _group_nice()
    give_way(nice)
    child = SPAWN.Queue()
    process = SPAWN.Process(target=_own, args=(child,))
    process.start()
    inherited = child.get(timeout=60)
    process.join()
    found.put((before, (os.getpriority(os.PRIO_PROCESS, 0), _group_nice()), inherited))


def _own(found: Any) -> None:
    found.put(os.getpriority(os.PRIO_PROCESS, 0))


def test_a_wish_that_comes_too_soon_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others' prefill workers start at the same moment, and the system refuses the second wish for a tenth of a second."""
    pauses: list[float] = []
    written: list[str] = []

    class Group:
        @staticmethod
        def write_text(text: str) -> None:
            if len(pauses) < 2:
                raise BlockingIOError
            written.append(text)

    monkeypatch.setattr(priority, "_GROUP", Group)
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setattr(os, "nice", lambda _: 0)
    monkeypatch.setattr(os, "getsid", lambda _: os.getpid())
    give_way(4)
    assert (written, len(pauses)) == (["4"], 2)


@pytest.mark.parametrize("nice", [0, 3])
@pytest.mark.parametrize("has_own_session", [True, False])
def test_a_process_and_a_session_of_its_own_give_way(nice: int, has_own_session: bool) -> None:
    """What it starts does, too; a session that others are in stays as it is."""
    found = SPAWN.Queue()
    process = SPAWN.Process(target=_after, args=(nice, has_own_session, found))
    process.start()
    (priority, group), after, inherited = found.get(timeout=60)
    process.join()
    lowered = min(priority + nice, 19)
    moved = nice if nice and has_own_session and group is not None else group
    assert after == (lowered, moved)
    assert inherited == lowered
