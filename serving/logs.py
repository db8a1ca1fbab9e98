"""Logs: one line per record, with the level, the process's name and the logger's name.

2026-01-31T12:00:00.123 INFO decode-0 worker.service: registered with 127.0.0.1:9100
"""

import asyncio
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

from serving.log_lines import MAX_TRACEBACK, safe_line
from serving.log_repeats import RepeatFilter
from serving.settings import Settings


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
