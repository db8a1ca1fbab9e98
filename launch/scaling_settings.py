"""The settings that all autoscalers have: the bounds of the pools, and the goals."""

from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from launch.settings import PairSettings
from serving.settings import Settings

WAKE_SECONDS = 540.0
"""The ``worker_wait_seconds`` of routers whose pools may be empty: below ``request_timeout_seconds``, above most starts."""
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

    @model_validator(mode="before")
    @classmethod
    def _split_ranges(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Let ``prefill`` and ``decode`` be LEAST:MOST."""
        found = dict(values)
        for name in ("prefill", "decode"):
            if isinstance(text := found.get(name), str) and ":" in text:
                given = found.get(f"max_{name}")
                found[name], _, most = text.partition(":")
                if given is not None and str(given) != most:
                    raise ValueError(f"{name} is {text}, and max_{name} is {given}: give one of the two")
                found[f"max_{name}"] = most
        return found


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
        needs = {
            "max_prefill": self.max_prefill,
            "max_decode": self.max_decode,
            "budget": self.budget,
            "timing": self.timing,
            **{name: getattr(self, name) for name in _PACE if name in self.model_fields_set},
        }
        if not self.autoscale:
            if useless := [name for name, value in needs.items() if value is not None]:
                raise ValueError(f"{useless[0]} has no effect without autoscale")
            return self
        check_bounds("prefill", self.least_prefill, self.max_prefill)
        check_bounds("decode", self.least_decode, self.max_decode)
        return self
