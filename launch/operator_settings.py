"""The settings of the commands that use a router's admin API."""

from pathlib import Path

from pydantic import Field

from launch.settings import CommandSettings, LogLevel
from serving.settings import Address


class OperatorSettings(CommandSettings):
    """The router, and the key for it."""

    admin: Address | None = None
    """HOST:PORT of the router's admin port; unset: that of the first router in the ready file."""
    ready_file: Path | None = None
    """File that a running `kvbaton up --ready-file FILE` has written."""
    admin_key: str | None = Field(default=None, repr=False)
    """Admin key of the router; prefer the variable: other users of this machine can see a flag."""
    as_json: bool = False
    """Print JSON; short form: --json."""
    log_level: LogLevel = "error"
    """Lowest level of the log records that are written."""


class WorkersSettings(OperatorSettings):
    """List the workers of a running service: their roles, states, queues, KV and latencies.

    Examples:
      kvbaton workers --admin 127.0.0.1:9101
      kvbaton workers --ready-file ready.json --json
    """


class TopSettings(OperatorSettings):
    """Show the workers of a running service, again and again, until Ctrl-C.

    With --json, each reading is one line of JSON.

    Examples:
      kvbaton top --admin 127.0.0.1:9101
      kvbaton top --ready-file ready.json --once --json
    """

    once: bool = False
    """Show one reading and exit."""
    interval_seconds: float = Field(default=1.0, ge=0.1, le=60)
    """Time between two readings."""
