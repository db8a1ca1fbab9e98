"""``kvbaton router``."""

import logging
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, model_validator

from cli.model import with_served_name
from cli.service import enter_service, model_folder, run_service
from cli.settings import ServiceSettings
from contract.identity import Role
from router.settings import RouterSettings
from serving.logs import log_settings
from serving.settings import Address
from worker.loop_watch import LoopWatch

logger = logging.getLogger(__name__)

HANG_SECONDS = 30.0
"""How long the router's event loop may do nothing."""


class RouterCommand(ServiceSettings, RouterSettings):
    """Start one router: text in, text out; it picks the workers and owns the request's life.

    Workers register at --internal with the secret of --secret-file. It needs neither torch nor a GPU.

    Example: kvbaton router --secret-file secret --internal 0.0.0.0:9100
    """

    internal: Address = "127.0.0.1:9100"
    """HOST:PORT where workers register; they need the cluster secret."""
    model: Annotated[Path | None, BeforeValidator(model_folder)] = None
    """Folder or Hugging Face id of the model, "demo" for the demo model; unset: asked of the first worker."""

    @model_validator(mode="before")
    @classmethod
    def _name_the_model(cls, values: dict[str, Any]) -> dict[str, Any]:
        return with_served_name(values, None)


def router(arguments: Sequence[str]) -> None:
    """``kvbaton router``."""
    settings = enter_service(RouterCommand, Role.ROUTER, arguments)
    log_settings(logger, settings)
    from router.service import serve

    run_service(
        settings, lambda told, ready: watched(serve(told, lambda addresses: ready(addresses.as_dict())))
    )


async def watched(work: Awaitable[None], patience_seconds: float = HANG_SECONDS) -> None:
    """Do the work, and end the process if its event loop hangs meanwhile: its ports would accept, and nobody be answered."""
    with LoopWatch(patience_seconds):
        await work
