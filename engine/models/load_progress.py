"""Progress of reading or packing weights: a bar on a terminal, else a log line every few seconds."""

import logging
import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

logger = logging.getLogger(__name__)

_GIB = 2**30
_LOG_SECONDS = 5.0


class LoadProgress:
    """Counts the bytes of weights that are loaded; a last line gives their number and the seconds.

    console: draws the bar if it is a terminal; None is standard error if ``has_terminal``. clock: in seconds. name: the
    subject of the log lines.
    """

    def __init__(
        self,
        total_bytes: int,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        name: str = "weights",
    ) -> None:
        self._name = name
        console = console or Console(stderr=True, force_terminal=has_terminal())
        self._total = total_bytes
        self._done = 0
        self._clock = clock
        self._start = self._logged = clock()
        self._is_drawn = console.is_terminal
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            console=console,
            transient=True,
            disable=not self._is_drawn,
        )
        self._task = self._bar.add_task(name.capitalize(), total=total_bytes)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        if kind is None:
            done = _gib(self._done)
            logger.info("%s: %s in %.1f s%s", self._name, done, self._seconds(), self._speed())

    def advance(self, num_bytes: int) -> None:
        """Count ``num_bytes`` more as loaded."""
        self._done += num_bytes
        self._bar.advance(self._task, num_bytes)
        if not self._is_drawn and self._clock() - self._logged >= _LOG_SECONDS:
            self._logged = self._clock()
            done = _gib(self._done)
            total = _gib(self._total)
            logger.info("%s: %s of %s%s", self._name, done, total, self._speed())

    def _seconds(self) -> float:
        return self._clock() - self._start

    def _speed(self) -> str:
        seconds = self._seconds()
        return f", {_gib(round(self._done / seconds))}/s" if seconds else ""


def has_terminal() -> bool:
    """Return whether standard error is a terminal of this process alone; supervised workers share theirs."""
    try:
        return os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
