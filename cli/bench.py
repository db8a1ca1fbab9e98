"""``kvbaton bench --profile``: measures a service and writes its timing model."""

import asyncio
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
from serving.logs import configure_logs


def bench(arguments: Sequence[str]) -> None:
    """Run ``kvbaton bench``."""
    settings = parse(BenchSettings, "kvbaton bench", arguments)
    settings.refuse_contradictions()
    configure_logs("bench", settings.log_level)
    asyncio.run(_run(settings))


async def _run(settings: BenchSettings) -> None:
    if settings.url is not None:
        await _profile(settings, endpoint_at(settings.url, settings), settings.admin or "")
        return

    async def use(facts: dict[str, Facts], _: asyncio.Event) -> None:
        await _profile(
            settings, local_endpoint(settings, facts[ROUTER]), local_address(facts[ROUTER]["admin"])
        )

    await run_local(settings, use)


async def _profile(settings: BenchSettings, endpoint: Endpoint, admin: str) -> None:
    async with admin_session(settings.admin_key) as session:
        router = RouterAdmin(admin, session)
        model = await profile(
            endpoint,
            router,
            settings.start_seconds,
            settings.longest_prompt,
            _note,
            rounds=settings.rounds,
            seed=settings.seed,
        )
    write_timing(settings.output, model)
    print(f"{settings.output} is written", flush=True)


def _note(line: str) -> None:
    print(line, flush=True)
