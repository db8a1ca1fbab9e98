"""The settings of the commands that use a router's admin API."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator
from pydantic_settings import CliPositionalArg, CliSuppress

from contract.errors import SettingError
from contract.options import MAX_SECONDS
from launch.settings import CommandSettings, LogLevel
from serving.settings import FLAG, Addresses


class OperatorSettings(CommandSettings):
    """The routers, and the key for them."""

    admin: Addresses | None = None
    """HOST:PORT of the routers' admin ports, separated by commas; a name may stand for several routers. Unset: those of all
    routers in the ready file."""
    ready_file: Path | None = None
    """File that a running `kvbaton up --ready-file FILE` has written."""
    admin_key: str | None = Field(default=None, repr=False)
    """Admin key of the routers. Not accepted as a flag, which other users of this machine can see."""
    as_json: bool = False
    """Print JSON; short form: --json."""
    log_level: LogLevel = "error"
    """Lowest level of the log records that are written."""


class WorkersSettings(OperatorSettings):
    """List the workers of a running service, or let one of them drain, serve again, or take another role.

    A worker is named by its id, or by the beginning of it. A worker that drains takes no new requests. Those that it has end
    there, or at the deadline on other workers. Its process keeps running. A worker that takes another role drains first.

    Examples:
      kvbaton workers --admin 127.0.0.1:9101
      kvbaton workers --ready-file ready.json --json
      kvbaton workers drain decode-0 --deadline 60 --ready-file ready.json
      kvbaton workers undrain decode-0 --ready-file ready.json
      kvbaton workers flip decode-1 prefill --ready-file ready.json
    """

    action: CliPositionalArg[Literal["list", "drain", "undrain", "flip"]] = "list"
    """The action."""
    worker: CliPositionalArg[str] = ""
    """Id of the worker of the action, or the beginning of it."""
    role: CliPositionalArg[Literal["", "prefill", "decode", "both"]] = ""
    """Role that the worker takes, with flip."""
    deadline_seconds: float | None = Field(default=None, ge=0, le=MAX_SECONDS)
    """Time for the requests of a worker that drains; unset: the worker's own drain_seconds; short form: --deadline."""
    wait: bool = True
    """Wait until the worker that drains holds nothing any more, or has taken its role."""

    @model_validator(mode="after")
    def _check_action(self) -> "WorkersSettings":
        if self.action == "list" and self.worker:
            raise ValueError(f"worker is {self.worker!r}, but the list is always of all workers")
        if self.action != "list" and not self.worker:
            raise ValueError(
                f"worker is not given: name the worker, as in `kvbaton workers {self.action} decode-0`"
            )
        if (self.action == "flip") is not bool(self.role):
            raise ValueError(
                f"role is {self.role!r}: flip needs a role, and nothing else takes one, as in"
                " `kvbaton workers flip decode-1 prefill`"
            )
        return self

    def refuse_useless_flags(self) -> None:
        """Raise SettingError for flags about a drain with another action."""
        flags = {name for name, origin in self.sources.origins.items() if origin == FLAG}
        used = {"drain": {"deadline_seconds", "wait"}, "flip": {"wait"}}.get(self.action, set())
        if useless := sorted(flags & {"deadline_seconds", "wait"} - used):
            raise SettingError(
                f"{useless[0]} has no effect on {self.action!r}; it belongs to `kvbaton workers drain WORKER`",
                param=useless[0],
            )


class ListSettings(WorkersSettings):
    """List the workers of a running service, of all its routers.

    Examples:
      kvbaton workers list --admin 127.0.0.1:9101
      kvbaton workers list --ready-file ready.json --json
    """

    action: CliSuppress[Literal["list"]] = "list"
    worker: CliSuppress[str] = ""
    role: CliSuppress[Literal["", "prefill", "decode", "both"]] = ""
    deadline_seconds: CliSuppress[float | None] = None
    wait: CliSuppress[bool] = True


class DrainSettings(WorkersSettings):
    """Let a worker take no new requests, and wait until it holds none.

    Those that it has end there, or at the deadline on other workers. Its process keeps running.

    Examples:
      kvbaton workers drain decode-0 --ready-file ready.json
      kvbaton workers drain decode-0 --deadline 60 --no-wait --admin 127.0.0.1:9101
    """

    action: CliSuppress[Literal["drain"]] = "drain"
    role: CliSuppress[Literal["", "prefill", "decode", "both"]] = ""


class UndrainSettings(WorkersSettings):
    """Let a worker that drains serve again.

    Example: kvbaton workers undrain decode-0 --ready-file ready.json
    """

    action: CliSuppress[Literal["undrain"]] = "undrain"
    role: CliSuppress[Literal["", "prefill", "decode", "both"]] = ""
    deadline_seconds: CliSuppress[float | None] = None
    wait: CliSuppress[bool] = True


class FlipSettings(WorkersSettings):
    """Let a worker take another role: it drains first, and its process keeps running.

    Example: kvbaton workers flip decode-1 prefill --ready-file ready.json
    """

    action: CliSuppress[Literal["flip"]] = "flip"
    deadline_seconds: CliSuppress[float | None] = None


ACTIONS: dict[str, type[WorkersSettings]] = {
    "list": ListSettings,
    "drain": DrainSettings,
    "undrain": UndrainSettings,
    "flip": FlipSettings,
}
"""The settings by action. What an action does not take is hidden from its help, and refused when it is given."""


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
