"""Logs: one line per record, with the level, the process's name and the logger's name.

2026-01-31T12:00:00.123 INFO decode-0 worker.service: registered with 127.0.0.1:9100

Control characters are written as escapes. Records of one place in the code beyond a rate are dropped and counted.
"""

import asyncio
import logging
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TextIO

from serving.settings import Settings

MAX_LINE = 8192
"""Maximum number of characters of a record; a longer one is shortened in the middle."""
MAX_TRACEBACK = 16_384
# The backslash, control characters (C0, DEL, C1), line and paragraph separators, marks of direction, invisible ones:
# a client could end a line with them, or forge one.
_UNSAFE = re.compile(
    "[\\\\\x00-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
_NAMED = {"\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
MAX_RECORDS = 20
MAX_INFO_RECORDS = 1000
"""Limits per place and ``WINDOW_SECONDS``: of warnings and errors, and of lower levels."""
WINDOW_SECONDS = 10.0
_MAX_PLACES = 1024
_Place = tuple[str, int, str]


class LineFormatter(logging.Formatter):
    """Formats a record as exactly one line of bounded length; control characters are written as escapes."""

    def __init__(self, process_name: str) -> None:
        super().__init__()
        self._process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without a line break at its end."""
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = safe_line(record.getMessage())
        if record.exc_info:
            line += "\\n" + safe_line(self.formatException(record.exc_info), MAX_TRACEBACK)
        if record.stack_info:
            line += "\\n" + safe_line(record.stack_info, MAX_TRACEBACK)
        return (
            f"{moment.removesuffix('+00:00')} {record.levelname} {self._process_name} {record.name}: {line}"
        )


def is_not_cancelled_call(record: logging.LogRecord) -> bool:
    """Return False for the traceback that gRPC logs for a call that is cancelled before it began, such as at a stop."""
    is_cancelled = record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError)
    return not (is_cancelled and record.name.startswith("grpc."))


def configure_logs(process_name: str, level: str = "INFO", stream: TextIO | None = None) -> None:
    """Send every record of this process at ``level`` and above to ``stream`` (standard error) as single lines.

    Replaces the handlers of the root logger; Python's warnings are records too. Call once, when the process starts.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter(process_name))
    handler.addFilter(is_not_cancelled_call)
    handler.addFilter(RepeatFilter())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    logging.captureWarnings(True)


def log_settings(logger: logging.Logger, settings: Settings) -> None:
    """Log all settings in one record, with masked secrets and the source of every setting that is not a default."""
    origins = settings.sources.origins
    shown = " ".join(
        f"{name}={value!r}" + (f" ({origins[name]})" if name in origins else "")
        for name, value in settings.masked().items()
    )
    logger.info("settings: %s", shown)


def safe_line(text: str, max_characters: int = MAX_LINE) -> str:
    """Return the text as one line of limited length, with escapes for characters that could end or forge a line."""
    return _UNSAFE.sub(_escape, cut(text, max_characters))


def cut(text: str, max_characters: int) -> str:
    """Return the text, or its beginning and end with the number of omitted characters between them."""
    if len(text) <= max_characters:
        return text
    tail = max_characters // 4
    head = max_characters - tail
    return f"{text[:head]} ... {len(text) - max_characters} characters ... {text[-tail:]}"


def _escape(match: re.Match[str]) -> str:
    found = match[0]
    code = ord(found)
    if found in _NAMED:
        return _NAMED[found]
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


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
        # asyncio reports faults of all kinds from one place: their classes and error numbers distinguish them.
        error = record.exc_info[1] if record.exc_info else None
        number = getattr(error, "errno", None)
        kind = f"{type(error).__name__} {number if isinstance(number, int) else ''}" if error else ""
        place = (record.pathname, record.lineno, kind)
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
