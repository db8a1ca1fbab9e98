"""The settings that commands and the library have in common, and the environment that all of them read."""

import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_settings import CliSuppress

from contract.errors import SettingError
from serving.settings import Address, Settings
from serving.settings_file import is_secret, nearest
from worker.options import WorkerOptions

DEMO = "demo"
"""The name of the model that is shipped with the package."""

LogLevel = Literal["debug", "info", "warning", "error"]
PREFIX = "KVBATON_"


def _check_ready_file(path: Path | None) -> Path | None:
    if path is None:
        return None
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError("it must be a file in a folder that exists and can be written to")
    return path


class CommandSettings(Settings):
    """The settings that every command has."""

    config: Path | None = None
    """TOML file with settings; a table named after a command is for that command only."""
    log_level: LogLevel = "info"
    """The least important log records that are written."""


class ServiceSettings(CommandSettings):
    """The settings that a command of one process adds to those of its service."""

    ready_fd: CliSuppress[int | None] = None
    """Open file descriptor that gets one JSON line when the service is ready; used by `kvbaton up`."""
    parent_pid: CliSuppress[int | None] = None
    """The process that this one shall not outlive; used by `kvbaton up`."""


class PoolSettings(CommandSettings):
    """Which model the processes of one machine serve, and how many workers there are."""

    model: str = DEMO
    """Folder or Hugging Face id of the model; "demo" is the small model that comes with kvbaton."""
    served_model_name: str | None = None
    """Name under which clients ask for the model; unset: the id, or the folder's name."""
    prefill: int | None = Field(default=None, ge=0, le=64)
    """Workers that compute prompts and hand their KV over; 1 where no pool is given."""
    decode: int | None = Field(default=None, ge=0, le=64)
    """Workers that fetch KV and stream tokens; 1 where no pool is given."""
    both: int | None = Field(default=None, ge=0, le=64)
    """Aggregated workers, which do both without a hand-over."""


class LocalSettings(WorkerOptions, PoolSettings):
    """The processes of one machine: how many, on which model, how the workers run."""

    num_threads: int | None = Field(default=None, ge=1)
    """Threads of each worker; unset: the machine's cores shared evenly."""
    pin_cores: bool = False
    """Keep each worker to cores of its own, as many as it has threads; for machines with nothing else to do."""
    prefill_nice: int = Field(default=5, ge=0, le=19)
    """How far prefill workers on the CPU give way to decode workers on the same cores, as nice(1) counts it."""
    http: Address = "127.0.0.1:8000"
    """HOST:PORT of the OpenAI API; port 0 picks a free one."""
    grpc: Address = "127.0.0.1:9000"
    """HOST:PORT of the gRPC API; port 0 picks a free one."""
    ready_file: Annotated[Path | None, AfterValidator(_check_ready_file)] = None
    """File that says, once the service can answer, where everything listens (JSON)."""
    secret_file: Path | None = None
    """File with the cluster's secret; unset: a fresh one, private to these processes."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """How long running answers may go on when the service is stopped; then they end with an error. A second signal: now."""
    files_dir: Path | None = None
    """Folder of /v1/files and /v1/batches, which are off without it; a service that ends with its command keeps none."""

    @property
    def keeps_files(self) -> bool:
        """Return whether the service may have files and batches: it is not there for one command alone."""
        return True

    @model_validator(mode="after")
    def _check_pools(self) -> "LocalSettings":
        num_prefill, num_decode, num_both = self.pools
        if bool(num_prefill) != bool(num_decode):
            missing, there = ("decode", "prefill") if num_prefill else ("prefill", "decode")
            raise ValueError(
                f"{there} is {num_prefill or num_decode} but {missing} is 0; the two need each other"
            )
        if not num_prefill + num_both:
            raise ValueError("prefill, decode and both are all 0; there must be at least one worker")
        return self

    @property
    def pools(self) -> tuple[int, int, int]:
        """Return the numbers of prefill, decode and aggregated workers; 1, 1 and 0 where none is given."""
        if self.prefill is None and self.decode is None and self.both is None:
            return 1, 1, 0
        return self.prefill or 0, self.decode or 0, self.both or 0


def refuse_unknown_variables(own: Collection[str], every: Callable[[], Collection[str]]) -> None:
    """Raise SettingError for a ``KVBATON_*`` variable that is no setting of any command: a typo sets nothing.

    own: names of this command's settings; every: those of all commands, asked only where ``own`` is not enough.
    """
    asked = {name[len(PREFIX) :].lower() for name in os.environ if name.upper().startswith(PREFIX)}
    if not (asked := asked - set(own)):
        return
    known = set(every())
    if unknown := sorted(asked - known):
        names = ", ".join(variable(name) for name in unknown)
        near = nearest(variable(unknown[0]), [variable(name) for name in known])
        raise SettingError(
            f"{names} in the environment is no setting of kvbaton{near}; see `kvbaton COMMAND --help`"
        )


def variable(name: str) -> str:
    """Return the name of a setting's environment variable."""
    return f"{PREFIX}{name.upper()}"


def child_environment(
    settings: Mapping[str, object] | None = None, names: Collection[str] | None = None
) -> dict[str, str]:
    """Return what a child process inherits: this environment over ``settings`` (by name), without the settings file.

    names: of the child's own settings. Other variables of ours, and whatever else is a secret by its name, are left out: a
    worker needs no client's key. None: for a process that is this one. The child gets what the file says by this, read
    once, and not the file. gRPC's own chatter is off unless it was asked for.
    """
    own = {name: value for name, value in os.environ.items() if name.upper() != variable("config")}
    if names is not None:
        wanted = {variable(name) for name in names}
        own = {name: value for name, value in own.items() if name.upper() in wanted or not _is_private(name)}
    taken = {name.upper() for name in own}
    given = {variable(name): _as_variable(value) for name, value in (settings or {}).items()}
    return {
        "GRPC_VERBOSITY": "ERROR",
        **{name: value for name, value in given.items() if name not in taken},
        **own,
    }


def _is_private(name: str) -> bool:
    return name.upper().startswith(PREFIX) or is_secret(name.lower())


def _as_variable(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def available_cores() -> list[int]:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
