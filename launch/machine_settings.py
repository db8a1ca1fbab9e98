"""The settings of the commands that describe a whole service on this machine: ``up``, ``serve``, ``demo`` and ``compose``.

``ScalingSettings`` has the bounds of the pools and the goals, which all autoscalers have (also ``kvbaton autoscaler``).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    field_validator,
    model_validator,
)
from pydantic_settings import CliPositionalArg

from contract.errors import SettingError
from contract.identity import Role
from engine.options import RankOptions
from launch.devices import RankCounts, parse_devices
from launch.settings import DEMO, LocalSettings, LogLevel, PairSettings, WritableFile
from serving.settings import Settings

WAKE_SECONDS = 540.0
"""The ``worker_wait_seconds`` of routers whose pools may be empty: below ``request_timeout_seconds``, above most starts."""
_MOST_WORKERS = 64
_PACE = ("scaling_interval_seconds", "shrink_after_seconds")


class ScalingSettings(Settings):
    """The greatest numbers of workers, and the goals. The least numbers are the settings ``prefill`` and ``decode``."""

    max_prefill: int | None = Field(default=None, ge=1, le=64)
    """Greatest number of prefill workers with autoscaling; unset: the least one."""
    max_decode: int | None = Field(default=None, ge=1, le=64)
    """Greatest number of decode workers with autoscaling; unset: the least one."""
    budget: int | None = Field(default=None, ge=2)
    """Most devices that the scaled pools use together, each rank of a worker one; unset: no limit."""
    timing: Path | None = None
    """Timing file of `kvbaton bench --profile`, for autoscaling; unset: the times follow from what is served."""
    ttft_goal_ms: float = Field(default=1000.0, gt=0, le=600_000)
    """Goal for the time to the first token, also for the routers' metrics of goals."""
    itl_goal_ms: float = Field(default=100.0, gt=0, le=600_000)
    """Goal for the time between the tokens of an answer, also for the routers' metrics of goals."""
    scaling_interval_seconds: float = Field(default=5.0, ge=0.1, le=30.0)
    """Seconds between two decisions of the autoscaler."""
    shrink_after_seconds: float = Field(default=180.0, ge=0.0, le=86_400.0)
    """A pool shrinks only to a number of workers that has sufficed for this time."""

    _ranges: Mapping[str, str] = PrivateAttr(default_factory=dict)
    """The values of ``prefill`` and ``decode`` that were given as LEAST:MOST, so that an error can repeat them."""

    @model_validator(mode="wrap")
    @classmethod
    def _split_ranges(cls, values: dict[str, Any], handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Let ``prefill`` and ``decode`` be LEAST:MOST."""
        found = dict(values)
        ranges: dict[str, str] = {}
        for name in ("prefill", "decode"):
            text = found.get(name)
            if not isinstance(text, str) or (bounds := _bounds_of(text)) is None:
                continue
            given = found.get(f"max_{name}")
            if given is not None and str(given) != str(bounds[1]):
                raise ValueError(f"{name} is {text}, and max_{name} is {given}: give one of the two")
            found[name], found[f"max_{name}"] = bounds
            ranges[name] = text
        made = handler(found)
        return made.with_ranges(ranges)

    def with_ranges(self, ranges: Mapping[str, str]) -> Self:
        """Keep how ``prefill`` and ``decode`` were written, by their names; return these settings."""
        self._ranges = ranges
        return self

    @field_validator("prefill", "decode", mode="before", check_fields=False)
    @classmethod
    def _refuse_other_ranges(cls, value: Any) -> Any:
        """Refuse what looks like a range and is none, in the name of the setting that has it."""
        if isinstance(value, str) and ":" in value:
            raise ValueError(
                f"a range is LEAST:MOST, as 1:4, and MOST is 1 to {_MOST_WORKERS} and not below LEAST"
            )
        return value


def _bounds_of(text: str) -> tuple[int, int] | None:
    """Return the numbers of LEAST:MOST; None if the text is not such a range."""
    parts = text.split(":")
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() and len(part) < 4 for part in parts):
        return None
    least, most = map(int, parts)
    return (least, most) if least <= most and 1 <= most <= _MOST_WORKERS else None


def check_bounds(name: str, least: int, most: int | None) -> None:
    """Raise ValueError if the greatest number of workers of a role is below the least one."""
    if most is not None and most < least:
        raise ValueError(f"max_{name} is {most}, and {name} is {least}: it must not be below that")


class AutoscaleSettings(ScalingSettings, PairSettings):
    """The settings of a command that may scale the pools that it describes."""

    autoscale: bool = False
    """Scale the pools; prefill and decode are then the least numbers of workers, and 1:4 stands for least and greatest.

    A pool of 0:4 is empty while there are no requests. The first request then waits for the start of a worker.
    """

    @property
    def least_prefill(self) -> int:
        """The least number of prefill workers; the only one without autoscaling."""
        return 1 if self.prefill is None else self.prefill

    @property
    def least_decode(self) -> int:
        """The least number of decode workers; the only one without autoscaling."""
        return 1 if self.decode is None else self.decode

    @property
    def most_prefill(self) -> int:
        """The greatest number of prefill workers."""
        return self.max_prefill or self.least_prefill

    @property
    def most_decode(self) -> int:
        """The greatest number of decode workers."""
        return self.max_decode or self.least_decode

    @property
    def may_be_empty(self) -> bool:
        """True if a pool may shrink to no worker."""
        return self.autoscale and 0 in (self.least_prefill, self.least_decode)

    @model_validator(mode="after")
    def _check_autoscale(self) -> "AutoscaleSettings":
        # A setting that has no effect is an error: a user who forgets --autoscale must not believe that pools grow.
        needs = {
            "max_prefill": self.max_prefill,
            "max_decode": self.max_decode,
            "budget": self.budget,
            "timing": self.timing,
            **{name: getattr(self, name) for name in _PACE if name in self.model_fields_set},
        }
        if not self.autoscale:
            if self._ranges:
                name, text = next(iter(self._ranges.items()))
                raise ValueError(f"{name} is {text}, and a range has no effect without autoscale")
            if useless := [name for name, value in needs.items() if value is not None]:
                raise ValueError(f"{useless[0]} has no effect without autoscale")
            return self
        check_bounds("prefill", self.least_prefill, self.max_prefill)
        check_bounds("decode", self.least_decode, self.max_decode)
        return self


class ComposeSettings(RankOptions, AutoscaleSettings):
    """Write a Docker Compose file: a router, workers on the CPU (profile cpu) or on GPUs (gpu), and monitoring.

    The images are built from this checkout, which the file refers to. Without lists of GPUs the workers take GPU 0, 1, ...
    With --autoscale a service of the file starts and removes workers as the load changes; lists of GPUs are then those
    that a role may take (docs/autoscaling.md).

    Examples:
      kvbaton compose --prefill 1 --decode 2
      kvbaton compose --prefill-devices 0,1 --decode-devices 2-7 --model models/llama
      kvbaton compose --prefill-devices 0-3 --decode-devices 4-7 --tensor-parallel-size 2
      kvbaton compose --autoscale --prefill-devices 0,1 --decode-devices 2-7 --timing timing.json --ttft-goal-ms 500
    """

    output: WritableFile = Path("compose.yaml")
    """File to write."""
    overwrite: bool = False
    """Replace an existing file."""
    log_level: LogLevel = "error"
    """Lowest level of the log records that are written."""

    @property
    def ranks(self) -> RankCounts:
        """The ranks of each worker, which is one container; so is a data-parallel group."""
        return RankCounts(data=self.data_parallel_size, tensor=self.tensor_parallel_size)

    def places(self) -> dict[Role, list[int]]:
        """Return the places of each role's largest pool. On place k, a worker or group has the GPUs from k * num_devices on.

        Raises SettingError for lists of GPUs that cannot be divided so, or that contradict the numbers of workers.
        """
        if (self.prefill_devices is None) is not (self.decode_devices is None):
            missing = "prefill_devices" if self.prefill_devices is None else "decode_devices"
            raise SettingError(
                f"{missing} is not set: list the GPUs of both roles, or of none", param=missing
            )
        if self.prefill_devices is None or self.decode_devices is None:
            _refuse_empty(self.most_prefill, "prefill")
            _refuse_empty(self.most_decode, "decode")
            places = list(range(self.most_prefill + self.most_decode))
            return {Role.PREFILL: places[: self.most_prefill], Role.DECODE: places[self.most_prefill :]}
        prefill = self._listed("prefill", self.prefill_devices, self.prefill, self.max_prefill)
        decode = self._listed("decode", self.decode_devices, self.decode, self.max_decode)
        if both := set(prefill) & set(decode):
            gpu = min(both) * self.ranks.num_devices
            raise SettingError(f"decode_devices has GPU {gpu}, as prefill_devices", param="decode_devices")
        return {Role.PREFILL: prefill, Role.DECODE: decode}

    def _listed(self, role: str, text: str, number: int | None, most: int | None) -> list[int]:
        """Return the places of the workers of a role whose GPUs are listed.

        number, most: of its workers, if they are given.
        """
        name = f"{role}_devices"
        size = self.ranks.num_devices
        sizes = f"tensor_parallel_size {self.tensor_parallel_size}"
        if self.data_parallel_size > 1:
            sizes = f"data_parallel_size {self.data_parallel_size} and {sizes}"
        devices = parse_devices(text)
        groups = [devices[first : first + size] for first in range(0, len(devices), size)]
        for group in groups:
            if group[0] % size or group != list(range(group[0], group[0] + size)):
                shown = ", ".join(map(str, group))
                raise SettingError(
                    f"{name} has {shown} for one worker: with {sizes} its GPUs are {size} side by"
                    f" side, the first one a multiple of {size}",
                    param=name,
                )
        if not self.autoscale:
            _refuse_empty(number, role)
        fixed = most if self.autoscale else number
        if fixed is not None and fixed != len(groups):
            # The error names the setting that gives the number, and repeats its value as it was written.
            if self.autoscale and role not in self._ranges:
                raise SettingError(
                    f"max_{role} is {most}, and {name} has GPUs for {len(groups)} workers",
                    param=f"max_{role}",
                )
            text = self._ranges.get(role, str(number)) if self.autoscale else str(number)
            raise SettingError(f"{role} is {text}, and {name} has GPUs for {len(groups)} workers", param=role)
        if number is not None and number > len(groups):
            raise SettingError(
                f"{role} is {number}, and {name} has GPUs for {len(groups)} workers", param=role
            )
        return [group[0] // size for group in groups]


def _refuse_empty(number: int | None, role: str) -> None:
    if number == 0:
        raise SettingError(f"{role} is 0; the file has workers of both roles", param=role)


class RoutersSettings(LocalSettings):
    """The settings of a service that may have several routers."""

    routers: int = Field(default=1, ge=1, le=64)
    """Number of router processes; each uses one core, and the death of one ends only the connections that it has."""
    shared_ports: bool = True
    """Let several routers share the HTTP and the gRPC port; otherwise their ports count up from these."""
    dry_run: bool = False
    """Print the device and the memory that each worker would get, and start nothing."""

    @property
    def num_routers(self) -> int:
        """The number of router processes."""
        return self.routers

    @property
    def shares_ports(self) -> bool:
        """True if several routers listen on the same ports for clients."""
        return self.shared_ports and self.routers > 1


class UpSettings(AutoscaleSettings, RoutersSettings):
    """Start a router and its workers on this machine, and keep them running.

    Without --prefill, --decode and --both it starts one prefill and one decode worker. A worker that dies is restarted.
    Ctrl-C or SIGTERM stops everything. With --autoscale the pools follow the load (docs/autoscaling.md).

    Examples:
      kvbaton up
      kvbaton up --model Qwen/Qwen2.5-0.5B-Instruct --prefill 2 --decode 2
      kvbaton up --routers 2 --prefill 2 --decode 4
      kvbaton up --prefill 2 --decode 6 --prefill-devices 0,1 --decode-devices 2-7 --dry-run
      kvbaton up --http 127.0.0.1:0 --grpc 127.0.0.1:0 --ready-file ready.json
      kvbaton up --autoscale --prefill 1:4 --decode 1:4
      kvbaton up --autoscale --prefill 0:4 --decode 0:4
      kvbaton up --autoscale --prefill 1:4 --decode 1:4 --timing timing.json --ttft-goal-ms 500 --itl-goal-ms 50
    """

    @model_validator(mode="after")
    def _check_both(self) -> "UpSettings":
        if self.autoscale and self.both:
            raise ValueError(
                f"both is {self.both}: aggregated workers are not scaled; leave it unset with autoscale"
            )
        return self

    @property
    def usual_prefill_nice(self) -> int:
        """The niceness of prefill workers on the CPU that has not been set: a process cannot give it back with its role."""
        return 0 if self.autoscale else super().usual_prefill_nice

    @property
    def largest_pools(self) -> tuple[int, int, int]:
        """The numbers of ``pools`` that have grown to their bounds."""
        num_prefill, num_decode, num_both = self.pools
        return self.max_prefill or num_prefill, self.max_decode or num_decode, num_both

    @property
    def router_defaults(self) -> dict[str, Any]:
        """Settings of the routers that differ from a router's own defaults: requests wait for the start of an empty pool."""
        return {"worker_wait_seconds": WAKE_SECONDS} if self.may_be_empty else {}

    def with_largest_pools(self) -> "UpSettings":
        """Return the settings of pools that have grown to their bounds."""
        return self.model_copy(update={"prefill": self.most_prefill, "decode": self.most_decode})


class ServeSettings(RoutersSettings):
    """Serve a model with one aggregated worker, without a hand-over; the same as `kvbaton up --both 1 --model MODEL`.

    Example: kvbaton serve Qwen/Qwen2.5-0.5B-Instruct
    """

    model: CliPositionalArg[str] = DEMO
    """Folder or Hugging Face id of the model; "demo" is the small model in the package."""
    both: int | None = Field(default=1, ge=0, le=64)
    """Number of aggregated workers, which compute prompts and decode them without a hand-over."""


class DemoSettings(LocalSettings):
    """Show a hand-over: start 1 prefill and 1 decode worker, send one question by HTTP and one by gRPC, keep serving."""

    log_level: LogLevel = "error"
    """Lowest level of the log records that are written."""
