"""Announcements of ranks that run on one machine: in memory that all of them have mapped, without calls.

Each rank has a word of its own there: the step up to which the group goes by its last announcement. The number of the group
is the greatest of these words, so it only grows, and no two ranks write the same word. A datagram to the socket of every
other rank (its bell) wakes those that wait for input. It carries nothing: a bell that is full, or whose rank has not joined
yet, loses nothing, as that rank reads the words afterwards.
"""

import mmap
import os
import socket
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

_WORD = 8
_LINE = 64
_FILE = "steps"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_BELL_BYTES = 16


def machine_identity() -> str:
    """Return a text that is equal in processes that share a temporary folder, and so memory; empty if none is known.

    Containers of one machine may have the same kernel and other folders, and users cannot open those of others.
    """
    folder = Path(tempfile.gettempdir())
    try:
        boot_id = _BOOT_ID.read_text().strip()
        info = folder.stat()
    except OSError:  # not Linux
        return ""
    return f"{boot_id} {os.geteuid()} {info.st_dev}:{info.st_ino} {folder}"


def create_steps(folder: Path, size: int) -> None:
    """Create the memory of a group of ``size`` ranks in a folder. Raises OSError."""
    with (folder / _FILE).open("xb") as file:
        file.truncate(size * _LINE)


class SharedSteps:
    """One rank's view of the memory. ``advance`` is called in the engine's thread, everything else in the member's.

    look_ahead: see CoordinatorSteps. Raises OSError if the memory cannot be opened.
    """

    def __init__(self, folder: Path, dp_rank: int, dp_size: int, look_ahead: int) -> None:
        self._look_ahead = look_ahead
        self._own = dp_rank * _LINE // _WORD
        self._others = [str(_bell(folder, rank)) for rank in range(dp_size) if rank != dp_rank]
        self._places = range(0, dp_size * _LINE // _WORD, _LINE // _WORD)
        with ExitStack() as undo, (folder / _FILE).open("r+b") as file:
            self._memory = undo.enter_context(mmap.mmap(file.fileno(), dp_size * _LINE))
            self._words = undo.enter_context(undo.enter_context(memoryview(self._memory)).cast("Q"))
            self._socket = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            self._socket.setblocking(False)
            self._socket.bind(str(_bell(folder, dp_rank)))
            self._owned = undo.pop_all()

    @property
    def step(self) -> int:
        """All ranks take part in the steps up to this one."""
        return max(self._words[place] for place in self._places)

    def advance(self, step: int) -> bool:
        """Advance the group for a step that this rank is about to make; return False if it goes so far already."""
        if step <= self.step:
            return False
        # An aligned word is written whole, and the system call below comes after it, as another one does before a reading.
        self._words[self._own] = step + self._look_ahead
        for bell in self._others:
            # Full: the rank has not read what woke it. Away: it reads the words when it joins, or is gone with the group.
            with suppress(OSError):
                self._socket.sendto(b"!", bell)
        return True

    def fileno(self) -> int:
        """Return the descriptor that is readable when another rank has advanced the group."""
        return self._socket.fileno()

    def clear_bell(self) -> None:
        """Read what has woken this rank. To be called before ``step`` is read: what is announced afterwards rings again."""
        with suppress(BlockingIOError):
            while self._socket.recv(_BELL_BYTES):
                pass

    def close(self) -> None:
        """Free everything. May be called twice."""
        self._owned.close()


def _bell(folder: Path, dp_rank: int) -> Path:
    return folder / f"bell-{dp_rank}"
