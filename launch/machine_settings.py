"""The settings of the commands that start a service on this machine and keep it running."""

from typing import Any

from pydantic import Field, model_validator
from pydantic_settings import CliPositionalArg

from launch.scaling_settings import WAKE_SECONDS, AutoscaleSettings
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
