"""The settings of ``kvbaton prefill | decode | both``."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from launch.model import model_folder, with_served_name
from launch.settings import DEMO, ServiceSettings
from worker.settings import WorkerSettings


class WorkerCommand(ServiceSettings, WorkerSettings):
    """The settings of a worker whose model may be the demo model or a Hugging Face id."""

    model: Annotated[Path, BeforeValidator(model_folder)] = Field(default=Path(DEMO), validate_default=True)
    """Folder or Hugging Face id of the model; "demo" is the small model in the package."""

    @model_validator(mode="before")
    @classmethod
    def _name_the_model(cls, values: dict[str, Any]) -> dict[str, Any]:
        return with_served_name(values, DEMO)


class PrefillCommand(WorkerCommand):
    """Start one prefill worker, which computes prompts and hands over their KV to decode workers.

    Example: kvbaton prefill --model demo --router 127.0.0.1:9100 --secret-file secret
    """


class DecodeCommand(WorkerCommand):
    """Start one decode worker, which fetches the KV of prompts and generates the tokens.

    Example: kvbaton decode --model demo --router 127.0.0.1:9100 --secret-file secret
    """


class BothCommand(WorkerCommand):
    """Start one aggregated worker, which computes prompts and decodes them itself.

    Example: kvbaton both --model demo --router 127.0.0.1:9100 --secret-file secret
    """
