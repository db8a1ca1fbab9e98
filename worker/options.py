"""The settings that all workers of ``kvbaton up`` share.

Declare a new one here, or in the group of the part that uses it (``engine.options``, ``kv_transfer.options``).
"""

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from contract.options import DrainOptions, Options
from data_parallel.options import GroupOptions
from engine.options import EngineOptions
from kv_transfer.options import TransferOptions


def _check_device(device: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,4})?", device):
        raise ValueError("it must be auto, cpu, cuda, or cuda:N for the GPU with this number")
    return device


class DeviceOptions(Options):
    """The device that the model runs on."""

    device: Annotated[str, AfterValidator(_check_device)] = "auto"
    """Device that the model runs on: auto, cpu, cuda, or cuda:N for one GPU."""


# Help texts list the fields of the last base first.
class WorkerOptions(DrainOptions, TransferOptions, GroupOptions, EngineOptions, DeviceOptions):
    """Everything that a user can set about how workers run."""

    engine: Literal["process", "in-process"] = "process"
    """Place of a worker's engine: a process of its own, or (in-process) a thread of the worker's process, which cannot be
    ended if a step hangs."""
    max_queued_tokens: int | None = Field(default=None, ge=1)
    """Limit of prompt tokens queued at a prefill worker; unset: enough for two steps."""
    drain_hold_seconds: float = Field(default=3600.0, gt=0)
    """Time for which a worker that an operator drains stays out of service after the drain's deadline; then it serves again.
    Each order to drain sets it anew."""

    @model_validator(mode="after")
    def _check_engine(self) -> Self:
        if self.engine == "in-process" and self.data_parallel_size > 1:
            raise ValueError(
                f"engine is {self.engine!r} and data_parallel_size is {self.data_parallel_size}: the engines of a group wait"
                " for each other in every step, so that one that hangs must be ended; set engine to 'process'"
            )
        return self
