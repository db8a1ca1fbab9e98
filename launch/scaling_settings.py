"""The settings that all autoscalers have: the bounds of the pools, and the goals."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ModelWrapValidatorHandler, PrivateAttr, field_validator, model_validator

from launch.settings import PairSettings
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

    def greatest_given_by(self, role: str) -> tuple[str, str]:
        """Return the setting that gives the greatest number of workers of a role, and its value as it was written."""
        if role in self._ranges:
            return role, self._ranges[role]
        return f"max_{role}", str(getattr(self, f"max_{role}"))


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
