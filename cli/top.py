"""``kvbaton top``: shows the workers of a running service, again and again."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live

from cli.pool_table import pool_view
from cli.router_admin import open_admin
from cli.terminal import replace_unencodable
from contract.errors import UnavailableError
from launch.arguments import parse
from launch.operator_settings import TopSettings
from launch.router_admin import ServiceAdmin
from serving import signals
from serving.logs import configure_logs


def top(arguments: Sequence[str]) -> None:
    """Run ``kvbaton top`` until Ctrl-C."""
    settings = parse(TopSettings, "kvbaton top", arguments)
    replace_unencodable()
    configure_logs("top", settings.log_level)
    signals.run(show_again_and_again(settings, Console(highlight=False)))


async def show_again_and_again(settings: TopSettings, console: Console) -> None:
    """Print readings until cancelled, or one with ``once``. Raises KvbatonError if the first reading fails."""
    async with open_admin(settings) as admin:
        if settings.as_json:
            async for pool, _ in _readings(admin, settings):
                console.file.write(json.dumps(pool) + "\n")
                console.file.flush()
        elif settings.once or not console.is_terminal:
            async for pool, remark in _readings(admin, settings):
                console.print(pool_view(pool, console, remark=remark))
        else:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                async for pool, remark in _readings(admin, settings):
                    live.update(pool_view(pool, console, remark=remark), refresh=True)


async def _readings(admin: ServiceAdmin, settings: TopSettings) -> AsyncIterator[tuple[dict[str, Any], str]]:
    """Yield what the router answers, and "". While it does not answer, yield its last answer and a remark."""
    pool = await admin.pool()
    yield pool, ""
    while not settings.once:
        await asyncio.sleep(settings.interval_seconds)
        try:
            pool = await admin.pool()
        except UnavailableError as error:
            yield pool, error.message
        else:
            yield pool, ""
