"""The settings that all workers of ``kvbaton up`` share.

Declare a new one here, or in the group of the part that uses it (``engine.options``, ``kv_transfer.options``).
"""

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from contract.options import DrainOptions, Options
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
class WorkerOptions(DrainOptions, TransferOptions, EngineOptions, DeviceOptions):
    """Everything that a user can set about how workers run."""

    max_queued_tokens: int | None = Field(default=None, ge=1)
    """Limit of prompt tokens queued at a prefill worker; unset: enough for two steps."""
    drain_hold_seconds: float = Field(default=3600.0, gt=0)
    """Time for which a worker that an operator drains stays out of service after the drain's deadline; then it serves again.
    Each order to drain sets it anew."""
