"""Ends a service process whose event loop hangs: its ports would still accept, and its peers would wait for ever."""

import asyncio
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Self

logger = logging.getLogger(__name__)
EXIT_CODE = 70
"""EX_SOFTWARE: the supervisor restarts the process."""
_LOOKS_PER_PATIENCE = 10


def _exit() -> None:
    faulthandler.dump_traceback(sys.__stderr__ or sys.stderr)
    os._exit(EXIT_CODE)


class LoopWatch:
    """Within the block, end the process if its event loop does nothing for ``patience_seconds``.

    Enter it in the loop to watch. Peers cannot notice the hang, since gRPC answers pings in its own threads. A thread
    asks the loop to increment a counter and checks whether it did. end: ends the process; must not return.
    """

    def __init__(self, patience_seconds: float, end: Callable[[], None] = _exit) -> None:
        self._patience = patience_seconds
        self._end = end
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
        interval = self._patience / _LOOKS_PER_PATIENCE
        seen = -1
        since = time.monotonic()
        looked_at = time.monotonic()
        while not self._is_over.wait(interval):
            now = time.monotonic()
            num_turns = self._num_turns
            was_away = now - looked_at > 2 * interval  # this process was stopped, or the machine slept
            looked_at = now
            if was_away or num_turns != seen:
                seen = num_turns
                since = now
                self._ask()
            elif now - since >= self._patience:
                logger.critical(
                    "the event loop has done nothing for %.1f s; ending this process", now - since
                )
                self._end()
                return

    def _ask(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._count)
