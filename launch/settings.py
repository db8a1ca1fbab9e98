"""The settings that commands and the library share, and the environment that all of them read."""

import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_settings import CliSuppress

from contract.errors import SettingError
from contract.identity import Role
from launch.devices import parse_devices
from prefill_service import NICENESS as PREFILL_NICENESS
from serving.settings import ListenAddress, Settings
from serving.settings_file import is_secret, nearest
from worker.options import WorkerOptions

DEMO = "demo"
"""Name of the model that is shipped with the package."""


def _check_devices(text: str) -> str:
    parse_devices(text)
    return text


Devices = Annotated[str, AfterValidator(_check_devices)]
LogLevel = Literal["debug", "info", "warning", "error"]
PREFIX = "KVBATON_"


def _check_writable(path: Path) -> Path:
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError("it must be a file in an existing, writable folder")
    return path


WritableFile = Annotated[Path, AfterValidator(_check_writable)]
"""A file that is going to be written; refused at once if that cannot work, and not when the work is done."""


class CommandSettings(Settings):
    """The settings of every command."""

    config: Path | None = None
    """TOML file with settings; a table named after a command applies to that command only."""
    log_level: LogLevel = "info"
    """Lowest level of the log records that are written."""


class ServiceSettings(CommandSettings):
    """The settings that a command of one process adds to those of its service."""

    ready_fd: CliSuppress[int | None] = None
    """Open file descriptor to which one JSON line is written when the service is ready; used by `kvbaton up`."""
    parent_pid: CliSuppress[int | None] = None
    """Process with which this one ends; used by `kvbaton up`."""


class PairSettings(CommandSettings):
    """A model, and the workers of both roles that serve it on one machine."""

    model: str = DEMO
    """Folder or Hugging Face id of the model; "demo" is the small model in the package."""
    prefill: int | None = Field(default=None, ge=0, le=64)
    """Number of prefill workers, which compute prompts and hand over their KV; 1 if no number of workers is given."""
    decode: int | None = Field(default=None, ge=0, le=64)
    """Number of decode workers, which fetch KV and generate tokens; 1 if no number of workers is given."""
    prefill_devices: Devices | None = None
    """GPUs of the prefill workers, as 0,2-4; unset: workers without a list are spread evenly over all GPUs."""
    decode_devices: Devices | None = None
    """GPUs of the decode workers; see prefill_devices."""


class PoolSettings(PairSettings):
    """The processes of one machine, and the numbers of workers."""

    served_model_name: str | None = None
    """Names of the model for clients, separated by commas; unset: the id, or the folder's name."""
    both: int | None = Field(default=None, ge=0, le=64)
    """Number of aggregated workers, which do both without a hand-over."""


class LocalSettings(WorkerOptions, PoolSettings):
    """The settings of all processes on one machine."""

    both_devices: Devices | None = None
    """GPUs of the aggregated workers; see prefill_devices."""
    num_threads: int | None = Field(default=None, ge=1)
    """Compute threads of each worker; unset: the machine's cores divided by the number of workers."""
    pin_cores: bool = False
    """Bind each worker to its own cores, one per thread; for machines that run nothing else."""
    prefill_nice: int | None = Field(default=None, ge=0, le=19)
    """Niceness (nice(1)) of prefill workers on the CPU: the higher, the more CPU time decode workers get.

    Unset: 5, or 0 with autoscale, whose workers change their roles.
    """
    http: ListenAddress = "127.0.0.1:8000"
    """HOST:PORT of the OpenAI API; port 0 picks a free one."""
    grpc: ListenAddress = "127.0.0.1:9000"
    """HOST:PORT of the gRPC API; port 0 picks a free one."""
    ready_file: WritableFile | None = None
    """JSON file with all addresses, written when the service is ready."""
    secret_file: Path | None = None
    """File with the cluster's secret; unset: a new one for these processes."""
    files_dir: Path | None = None
    """Folder of /v1/files and /v1/batches; unset: both are disabled, as they always are in run, chat and batch."""

    @property
    def usual_prefill_nice(self) -> int:
        """The niceness of prefill workers on the CPU that has not been set."""
        return PREFILL_NICENESS

    @property
    def given_devices(self) -> dict[Role, list[int] | None]:
        """The GPUs of each role's workers, None where none are given."""
        texts = (self.prefill_devices, self.decode_devices, self.both_devices)
        return {
            role: None if text is None else parse_devices(text)
            for role, text in zip((Role.PREFILL, Role.DECODE, Role.AGGREGATED), texts, strict=True)
        }

    @property
    def num_routers(self) -> int:
        """The number of router processes."""
        return 1

    @property
    def shares_ports(self) -> bool:
        """True if several routers listen on the same ports for clients."""
        return False

    @property
    def keeps_files(self) -> bool:
        """True if the service may keep files and batches; False if it runs for one command only."""
        return True

    @model_validator(mode="after")
    def _check_pools(self) -> "LocalSettings":
        num_prefill, num_decode, num_both = self.largest_pools
        if bool(num_prefill) != bool(num_decode):
            missing, there = ("decode", "prefill") if num_prefill else ("prefill", "decode")
            none = "not given" if getattr(self, missing) is None else "0"
            raise ValueError(
                f"{there} is {num_prefill or num_decode} but {missing} is {none}; each needs the other"
            )
        if not num_prefill + num_both:
            raise ValueError("prefill, decode and both are all 0; there must be at least one worker")
        return self

    @property
    def largest_pools(self) -> tuple[int, int, int]:
        """The numbers of ``pools`` that have grown to their bounds."""
        return self.pools

    @property
    def pools(self) -> tuple[int, int, int]:
        """The numbers of prefill, decode and aggregated workers; 1, 1 and 0 if none is given."""
        if self.prefill is None and self.decode is None and self.both is None:
            return 1, 1, 0
        return self.prefill or 0, self.decode or 0, self.both or 0


def refuse_unknown_variables(own: Collection[str], every: Callable[[], Collection[str]]) -> None:
    """Raise SettingError for a ``KVBATON_*`` variable that is not a setting of any command, such as a typo.

    own: names of this command's settings. every: returns those of all commands; called only if needed.
    """
    found = {name[len(PREFIX) :].lower() for name in os.environ if name.upper().startswith(PREFIX)}
    if not (found := found - set(own)):
        return
    known = set(every())
    if unknown := sorted(found - known):
        names = ", ".join(variable(name) for name in unknown)
        near = nearest(variable(unknown[0]), [variable(name) for name in known])
        raise SettingError(f"unknown setting {names} in the environment{near}; see `kvbaton COMMAND --help`")


def variable(name: str) -> str:
    """Return the name of a setting's environment variable."""
    return f"{PREFIX}{name.upper()}"


def child_environment(
    settings: Mapping[str, object] | None = None, names: Collection[str] | None = None
) -> dict[str, str]:
    """Return the environment of a child process: this process's own, then ``settings`` (by name) where it has no value.

    names: the child's settings; None: all. Other ``KVBATON_*`` variables and variables that are secrets by their names are
    left out: a worker needs no client's key. The settings file is left out too: its values are in ``settings``. gRPC's own
    log messages are off unless the environment enables them.
    """
    # pydantic reads variables in any case, so they are compared in upper case here too.
    own = {name: value for name, value in os.environ.items() if name.upper() != variable("config")}
    if names is not None:
        needed = {variable(name) for name in names}
        own = {
            name: value
            for name, value in own.items()
            if name.upper() in needed or not (name.upper().startswith(PREFIX) or is_secret(name.lower()))
        }
    taken = {name.upper() for name in own}
    given = {
        variable(name): value if isinstance(value, str) else json.dumps(value)
        for name, value in (settings or {}).items()
    }
    return {
        "GRPC_VERBOSITY": "ERROR",
        **{name: value for name, value in given.items() if name not in taken},
        **own,
    }


def available_cores() -> list[int]:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
