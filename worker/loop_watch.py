"""Ends a service process whose event loop hangs: its ports would still accept, and its peers would wait for ever."""

import asyncio
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

logger = logging.getLogger(__name__)
EXIT_CODE = 70
"""EX_SOFTWARE: the supervisor restarts the process."""
_LOOKS_PER_PATIENCE = 10
STARVED_FACTOR = 20
"""The factor of the time for which a loop may do nothing in a process that other processes keep from the processors."""
_STARVED_SHARE = 0.25
"""The share of the time that a thread waits for a processor, from which on its process counts as starved."""
_THREADS = Path("/proc/self/task")


def _exit() -> None:
    faulthandler.dump_traceback(sys.__stderr__ or sys.stderr)
    os._exit(EXIT_CODE)  # sys.exit would end this thread only


def queued_nanoseconds_by_thread(threads: Path = _THREADS) -> dict[str, int]:
    """Return the nanoseconds that each thread of this process has waited for a processor; none where nothing counts them."""
    found = {}
    with suppress(OSError):
        for thread in threads.iterdir():
            with suppress(OSError, ValueError):  # it has ended meanwhile
                _, queued, _ = (thread / "schedstat").read_text().split()
                found[thread.name] = int(queued)
    return found


class LoopProgress:
    """Decides from the turns of a loop whether it hangs. Pure: times, turns and waits are inputs.

    A loop waits for a processor itself, or for Python's lock, which a thread holds that waits for a processor: any starved
    thread of the process excuses it. A thread that is blocked does not wait for a processor. now: seconds. has_turned: the
    last look has seen a sign of life, so that the loop is to be asked again.
    """

    def __init__(self, patience_seconds: float, now: float) -> None:
        self._patience = patience_seconds
        self.has_turned = True
        self._seen = -1
        self._since = self._looked_at = now
        self._queued: Mapping[str, int] = {}

    @property
    def interval(self) -> float:
        """Seconds between two looks."""
        return self._patience / _LOOKS_PER_PATIENCE

    def look(self, now: float, num_turns: int, queued: Mapping[str, int]) -> float | None:
        """Return for how many seconds the loop has hung; None if it works, or there is no proof that it does not.

        queued: nanoseconds in the queue for a processor, by thread.
        """
        was_away = now - self._looked_at > 2 * self.interval  # this process was stopped, or the machine slept
        self._looked_at = now
        self.has_turned = was_away or num_turns != self._seen
        if self.has_turned:
            self._seen = num_turns
            self._since = now
            self._queued = queued
            return None
        seconds = now - self._since
        # The longest wait of one thread, not the sum: many threads that each waited a little prove no starvation.
        longest = max((value - self._queued.get(name, 0) for name, value in queued.items()), default=0)
        is_starved = longest >= _STARVED_SHARE * seconds * 1e9
        return seconds if seconds >= self._patience * (STARVED_FACTOR if is_starved else 1) else None


class LoopWatch:
    """Within the block, end the process if its event loop does nothing for ``patience_seconds``.

    Enter it in the loop to watch. Peers cannot notice the hang, since gRPC answers pings in its own threads. A thread
    asks the loop to increment a counter and checks whether it did. end: ends the process; must not return. queued: reads the
    waits of the process's threads for a processor.
    """

    def __init__(
        self,
        patience_seconds: float,
        end: Callable[[], None] = _exit,
        queued: Callable[[], Mapping[str, int]] = queued_nanoseconds_by_thread,
    ) -> None:
        self._patience = patience_seconds
        self._end = end
        self._queued = queued
        self._loop = asyncio.get_running_loop()
        self._num_turns = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loop-watch", daemon=True)

    def __enter__(self) -> Self:
        """Start the watch."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the watch."""
        self._is_over.set()

    def _count(self) -> None:
        self._num_turns += 1

    def _watch(self) -> None:
        progress = LoopProgress(self._patience, time.monotonic())
        while not self._is_over.wait(progress.interval):
            seconds = progress.look(time.monotonic(), self._num_turns, self._queued())
            if seconds is not None:
                logger.critical("the event loop has done nothing for %.1f s; ending this process", seconds)
                self._end()
                return
            if progress.has_turned and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._count)
