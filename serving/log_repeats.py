"""Limits the log of a repeated fault: records from one place in the code beyond a rate are dropped and counted."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

MAX_RECORDS = 20
MAX_INFO_RECORDS = 1000
"""Limits per place and ``WINDOW_SECONDS``: of warnings and errors, and of lower levels."""
WINDOW_SECONDS = 10.0
_MAX_PLACES = 1024
_Place = tuple[str, int, str]


@dataclass
class _Window:
    """The records of one place since ``begin``."""

    begin: float
    num_records: int = 0
    num_dropped: int = 0


class RepeatFilter(logging.Filter):
    """Drops a place's records beyond the limit. The first one after the window contains the number of dropped ones.

    Attach it to a handler, which receives the records of all loggers. clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._windows: dict[_Place, _Window] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is written; it may be changed."""
        now = self._clock()
        place = (record.pathname, record.lineno, _exception_name(record))
        window = self._windows.get(place)
        if window is None or now - window.begin >= WINDOW_SECONDS:
            num_dropped = window.num_dropped if window else 0
            window = self._begin(place, now)
            if num_dropped:
                record.msg = f"{record.getMessage()} (and {num_dropped} more like it before)"
                record.args = ()
        window.num_records += 1
        most = MAX_RECORDS if record.levelno >= logging.WARNING else MAX_INFO_RECORDS
        if window.num_records <= most:
            return True
        window.num_dropped += 1
        return False

    def _begin(self, place: _Place, now: float) -> _Window:
        self._windows.pop(place, None)
        if len(self._windows) >= _MAX_PLACES:
            del self._windows[next(iter(self._windows))]
        window = self._windows[place] = _Window(now)
        return window


def _exception_name(record: logging.LogRecord) -> str:
    """Return a name that distinguishes faults that asyncio reports from one place."""
    if not record.exc_info or record.exc_info[1] is None:
        return ""
    error = record.exc_info[1]
    number = getattr(error, "errno", None)
    return f"{type(error).__name__} {number if isinstance(number, int) else ''}"
