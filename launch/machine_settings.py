"""The settings of the commands that start a service on this machine and keep it running."""

from pathlib import Path
from typing import Any

from pydantic import Field, model_validator
from pydantic_settings import CliPositionalArg

from launch.settings import DEMO, LocalSettings, LogLevel


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


class UpSettings(RoutersSettings):
    """Start a router and its workers on this machine, and keep them running.

    Without --prefill, --decode and --both it starts one prefill and one decode worker. A worker that dies is restarted.
    Ctrl-C or SIGTERM stops everything. With --autoscale the pools follow the load (docs/autoscaling.md).

    Examples:
      kvbaton up
      kvbaton up --model Qwen/Qwen2.5-0.5B-Instruct --prefill 2 --decode 2
      kvbaton up --routers 2 --prefill 2 --decode 4
      kvbaton up --prefill 2 --decode 6 --prefill-devices 0,1 --decode-devices 2-7 --dry-run
      kvbaton up --http 127.0.0.1:0 --grpc 127.0.0.1:0 --ready-file ready.json
      kvbaton up --autoscale --prefill 1:4 --decode 1:4 --timing timing.json --ttft-goal-ms 500 --itl-goal-ms 50
    """

    autoscale: bool = False
    """Scale the pools; prefill and decode are then the least numbers of workers, and 1:4 stands for least and greatest."""
    max_prefill: int | None = Field(default=None, ge=1, le=64)
    """Greatest number of prefill workers with autoscale; unset: the least one."""
    max_decode: int | None = Field(default=None, ge=1, le=64)
    """Greatest number of decode workers with autoscale; unset: the least one."""
    budget: int | None = Field(default=None, ge=2)
    """Most devices that the scaled pools use together, each rank of a worker one; unset: no limit."""
    timing: Path | None = None
    """Timing file of `kvbaton bench --profile`, for autoscale."""
    ttft_goal_ms: float = Field(default=1000.0, gt=0, le=600_000)
    """Goal for the time to the first token, also for the routers' metrics of goals."""
    itl_goal_ms: float = Field(default=100.0, gt=0, le=600_000)
    """Goal for the time between the tokens of an answer, also for the routers' metrics of goals."""

    @model_validator(mode="before")
    @classmethod
    def _split_ranges(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Let ``prefill`` and ``decode`` be LEAST:MOST."""
        found = dict(values)
        for name in ("prefill", "decode"):
            if isinstance(text := found.get(name), str) and ":" in text:
                found[name], _, found[f"max_{name}"] = text.partition(":")
        return found

    @model_validator(mode="after")
    def _check_autoscale(self) -> "UpSettings":
        num_prefill, num_decode, num_both = self.pools
        needs = {
            "max_prefill": self.max_prefill,
            "max_decode": self.max_decode,
            "budget": self.budget,
            "timing": self.timing,
        }
        if not self.autoscale:
            if useless := [name for name, value in needs.items() if value is not None]:
                raise ValueError(f"{useless[0]} has no effect without autoscale")
            return self
        if self.timing is None:
            raise ValueError("autoscale needs a timing file: `kvbaton bench --profile` writes one")
        if num_both:
            raise ValueError(
                f"both is {num_both}: aggregated workers are not scaled; leave it unset with autoscale"
            )
        for name, least, most in (
            ("prefill", num_prefill, self.max_prefill),
            ("decode", num_decode, self.max_decode),
        ):
            if most is not None and most < least:
                raise ValueError(f"max_{name} is {most}, and {name} is {least}: it must not be below that")
        return self

    def with_largest_pools(self) -> "UpSettings":
        """Return the settings of pools that have grown to their bounds."""
        num_prefill, num_decode, _ = self.pools
        largest = {"prefill": self.max_prefill or num_prefill, "decode": self.max_decode or num_decode}
        return self.model_copy(update=largest)


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
