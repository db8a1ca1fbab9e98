"""``kvbaton workers``: lists the workers of a running service."""

import asyncio
import json
from collections.abc import Sequence

from rich.console import Console

from cli.pool_table import pool_view
from cli.router_admin import open_admin
from cli.terminal import replace_unencodable
from launch.arguments import parse
from launch.operator_settings import WorkersSettings
from serving.logs import configure_logs

LONG = {"--json": "--as-json"}
"""Short flags that cannot be names of settings."""


def workers(arguments: Sequence[str]) -> None:
    """Run ``kvbaton workers``."""
    settings = parse(WorkersSettings, "kvbaton workers", [LONG.get(one, one) for one in arguments])
    replace_unencodable()
    configure_logs("workers", settings.log_level)
    asyncio.run(_list(settings))


async def _list(settings: WorkersSettings) -> None:
    async with open_admin(settings) as admin:
        pool = await admin.pool()
    if settings.as_json:
        print(json.dumps(pool, indent=2))
    else:
        console = Console(highlight=False)
        console.print(pool_view(pool, console))
