"""``kvbaton router``."""

import logging
from collections.abc import Awaitable, Sequence

from cli.service import enter_service, run_service
from contract.identity import Role
from launch.router_settings import RouterCommand
from serving.logs import log_settings
from worker.loop_watch import LoopWatch

logger = logging.getLogger(__name__)

HANG_SECONDS = 30.0
"""Time after which an event loop that does nothing counts as hung."""


def router(arguments: Sequence[str]) -> None:
    """Run ``kvbaton router``."""
    settings = enter_service(RouterCommand, Role.ROUTER, arguments)
    log_settings(logger, settings)
    from router.service import serve

    run_service(
        settings,
        lambda settings, ready: watched(serve(settings, lambda addresses: ready(addresses.as_dict()))),
    )


async def watched(work: Awaitable[None], patience_seconds: float = HANG_SECONDS) -> None:
    """Await ``work``, and end the process if its event loop hangs: its ports would accept connections and never answer."""
    with LoopWatch(patience_seconds):
        await work
