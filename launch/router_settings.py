"""The settings of ``kvbaton router``, whose model may be the demo model or a Hugging Face id."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, model_validator

from launch.model import model_folder, with_served_name
from launch.settings import ServiceSettings
from router.settings import RouterSettings
from serving.settings import ListenAddress


class RouterCommand(ServiceSettings, RouterSettings):
    """Start one router, which serves the public APIs and selects the workers of each request.

    Workers register at --internal with the secret of --secret-file. It needs neither torch nor a GPU.

    Example: kvbaton router --secret-file secret --internal 0.0.0.0:9100
    """

    internal: ListenAddress = "127.0.0.1:9100"
    """HOST:PORT at which workers register; they need the cluster secret."""
    model: Annotated[Path | None, BeforeValidator(model_folder)] = None
    """Folder or Hugging Face id of the model, "demo" for the demo model; unset: fetched from the first worker."""

    @model_validator(mode="before")
    @classmethod
    def _name_the_model(cls, values: dict[str, Any]) -> dict[str, Any]:
        return with_served_name(values, None)
