"""The threads and descriptors that a test has opened and left, whatever other tests have left in this process."""

import gc
import threading
from pathlib import Path


class Leftovers:
    """Records the threads and descriptors of the process when it is made; those that end later do not matter."""

    def __init__(self) -> None:
        gc.collect()  # which closes descriptors that earlier tests have left
        self._threads = set(threading.enumerate())
        self._descriptors = _descriptors()

    def threads(self, prefix: str = "") -> list[threading.Thread]:
        """Return the newer threads that run, of those whose names begin with ``prefix``."""
        newer = set(threading.enumerate()) - self._threads
        return [thread for thread in newer if thread.name.startswith(prefix)]

    def descriptors(self) -> set[str]:
        """Return the newer descriptors that are open, each with its target. Memory of fake pools does not count."""
        return _descriptors() - self._descriptors


def _descriptors() -> set[str]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.add(f"{entry.name} {entry.readlink()}")
        except FileNotFoundError:  # the listing's own descriptor
            continue
    return {name for name in found if "/proc/" not in name and "kvbaton-test-pool" not in name}
