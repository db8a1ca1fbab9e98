"""The settings of a worker that do not say which worker it is: ``kvbaton up`` gives the same to each of its workers.

A new one is declared here, or in the group of the part that it is for (``engine.options``, ``kv_transfer.options``).
"""

from typing import Literal

from pydantic import Field

from contract.options import Options
from engine.options import EngineOptions
from kv_transfer.options import TransferOptions


class DeviceOptions(Options):
    """The kind of device that computes."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs."""


# Help texts list the fields of the last base first.
class WorkerOptions(TransferOptions, EngineOptions, DeviceOptions):
    """All that a user says of how a worker runs, wherever it runs."""

    max_queued_tokens: int | None = Field(default=None, ge=1)
    """Prompt tokens up to which a prefill worker is given more requests; two steps' worth where unset."""
