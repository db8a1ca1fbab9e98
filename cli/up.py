"""``kvbaton up`` and ``kvbaton serve MODEL``: run all processes on this machine until a signal."""

import asyncio
import logging
from collections.abc import Sequence
from importlib.metadata import version

from autoscaler.scaled_cluster import run_scaled
from cli.endpoint import local_endpoint
from launch.arguments import parse
from launch.kept_process import Facts
from launch.local_cluster import run_local
from launch.machine_settings import RoutersSettings, ServeSettings, UpSettings
from launch.memory_plan import planned
from launch.processes import router_names
from serving.logs import configure_logs, log_settings

logger = logging.getLogger(__name__)


def up(arguments: Sequence[str]) -> None:
    """Run ``kvbaton up``."""
    _serve_until_stopped(parse(UpSettings, "kvbaton up", arguments))


def serve(arguments: Sequence[str]) -> None:
    """Run ``kvbaton serve MODEL``."""
    _serve_until_stopped(parse(ServeSettings, "kvbaton serve", arguments))


def _serve_until_stopped(settings: RoutersSettings) -> None:
    scaled = settings if isinstance(settings, UpSettings) and settings.autoscale else None
    if settings.dry_run:
        print("\n".join(planned(scaled.with_largest_pools() if scaled else settings)))
        return
    configure_logs("up", settings.log_level)
    logger.info("kvbaton %s", version("kvbaton"))
    log_settings(logger, settings)

    async def announce(facts: dict[str, Facts], stopped: asyncio.Event) -> None:
        names = router_names(settings)
        for router in (facts[name] for name in (names[:1] if settings.shares_ports else names)):
            url = local_endpoint(settings, router).url
            print(
                f"kvbaton is ready: OpenAI API {url}/v1, gRPC {router['grpc']}, admin {router['admin']}",
                flush=True,
            )
        await stopped.wait()

    if scaled:
        run_scaled(scaled, announce)
    else:
        run_local(settings, announce)
