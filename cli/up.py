"""``kvbaton up`` and ``kvbaton serve MODEL``: run all processes on this machine until a signal."""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version

from autoscaler.scaled_cluster import run_scaled
from autoscaler.timing_model import TimingModel
from cli.endpoint import local_endpoint
from cli.profile import profile
from launch.arguments import parse
from launch.local_cluster import run_local
from launch.machine_settings import RoutersSettings, ServeSettings, UpSettings
from launch.memory_plan import planned
from launch.router_admin import RouterAdmin
from launch.router_processes import router_names
from launch.spec import Facts
from serving.logs import configure_logs, log_settings

logger = logging.getLogger(__name__)
_LONGEST_PROMPT = 1024


def up(arguments: Sequence[str]) -> None:
    """Run ``kvbaton up``."""
    _serve_until_stopped(parse(UpSettings, "kvbaton up", arguments))


def serve(arguments: Sequence[str]) -> None:
    """Run ``kvbaton serve MODEL``."""
    _serve_until_stopped(parse(ServeSettings, "kvbaton serve", arguments))


def _serve_until_stopped(settings: RoutersSettings) -> None:
    if settings.dry_run:
        print("\n".join(planned(settings)))
        return
    configure_logs("up", settings.log_level)
    logger.info("kvbaton %s", version("kvbaton"))
    log_settings(logger, settings)

    async def announce(facts: dict[str, Facts], stopped: asyncio.Event) -> None:
        for router in (facts[name] for name in router_names(settings)):
            url = local_endpoint(settings, router).url
            print(
                f"kvbaton is ready: OpenAI API {url}/v1, gRPC {router['grpc']}, admin {router['admin']}",
                flush=True,
            )
        await stopped.wait()

    if isinstance(settings, UpSettings) and settings.autoscale:
        asyncio.run(run_scaled(settings, announce, partial(measured, settings)))
    else:
        asyncio.run(run_local(settings, announce))


async def measured(
    settings: UpSettings, router: Facts, admin: RouterAdmin, start_seconds: float
) -> TimingModel:
    """Measure the service before it is announced. Raises KvbatonError."""
    print("measuring the service for its autoscaler; --timing FILE makes that unnecessary", flush=True)
    endpoint = local_endpoint(settings, router)
    return await profile(endpoint, admin, start_seconds, _LONGEST_PROMPT, logger.info)
