"""``kvbaton bench --profile``: measures a service and writes its timing model."""

import asyncio
import time
from collections.abc import Sequence

from autoscaler.timing_model import write_timing
from cli.endpoint import Endpoint, endpoint_at, local_endpoint
from cli.profile import profile
from contract.addresses import local_address
from launch.arguments import parse
from launch.client_settings import BenchSettings
from launch.local_cluster import run_local
from launch.router_admin import RouterAdmin, admin_session
from launch.router_processes import ROUTER
from launch.spec import Facts
from serving import signals
from serving.logs import configure_logs

_UNKNOWN_START_SECONDS = 60.0
"""The time of a start of a service that runs already."""


def bench(arguments: Sequence[str]) -> None:
    """Run ``kvbaton bench``."""
    settings = parse(BenchSettings, "kvbaton bench", arguments)
    settings.refuse_contradictions()
    configure_logs("bench", settings.log_level)
    if settings.url is not None:
        endpoint = endpoint_at(settings.url, settings)
        signals.run(_profile(settings, endpoint, settings.admin or "", _UNKNOWN_START_SECONDS))
        return
    begin = time.monotonic()

    async def use(facts: dict[str, Facts], _: asyncio.Event) -> None:
        seconds = time.monotonic() - begin
        admin = local_address(facts[ROUTER]["admin"])
        await _profile(settings, local_endpoint(settings, facts[ROUTER]), admin, seconds)

    run_local(settings, use)


async def _profile(settings: BenchSettings, endpoint: Endpoint, admin: str, start_seconds: float) -> None:
    """Measure the service and write the file. start_seconds: those of a start, unless the settings have them."""
    async with admin_session(settings.admin_key) as session:
        router = RouterAdmin(admin, session)
        model = await profile(
            endpoint,
            router,
            settings.start_seconds or start_seconds,
            settings.longest_prompt,
            _note,
            rounds=settings.rounds,
            seed=settings.seed,
        )
    write_timing(settings.output, model)
    print(f"{settings.output} is written", flush=True)


def _note(line: str) -> None:
    print(line, flush=True)
