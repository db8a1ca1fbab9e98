"""The settings that all workers of ``kvbaton up`` share.

Declare a new one here, or in the group of the part that uses it (``engine.options``, ``kv_transfer.options``).
"""

from typing import Literal

from pydantic import Field

from contract.options import DrainOptions, Options
from engine.options import EngineOptions
from kv_transfer.options import TransferOptions


class DeviceOptions(Options):
    """The device that the model runs on."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device that the model runs on."""


# Help texts list the fields of the last base first.
class WorkerOptions(DrainOptions, TransferOptions, EngineOptions, DeviceOptions):
    """Everything that a user can set about how workers run."""

    max_queued_tokens: int | None = Field(default=None, ge=1)
    """Limit of prompt tokens queued at a prefill worker; unset: enough for two steps."""
