"""``kvbaton workers``: lists the workers of a running service, and lets one drain, serve again, or take another role."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from cli.pool_table import pool_view
from cli.router_admin import RouterAdmin, open_admin
from cli.terminal import replace_unencodable
from contract.errors import NotFoundError
from launch.arguments import parse
from launch.operator_settings import WorkersSettings
from serving.logs import configure_logs
from serving.settings_file import nearest

LONG = {"--json": "--as-json", "--deadline": "--deadline-seconds"}
"""Short flags that cannot be names of settings."""
_WAIT_SECONDS = 10.0
"""The time for which one call waits; the next one follows."""
_OVER = ("empty", "leaving")


def workers(arguments: Sequence[str]) -> None:
    """Run ``kvbaton workers``."""
    settings = parse(WorkersSettings, "kvbaton workers", [long_form(one) for one in arguments])
    settings.refuse_useless_flags()
    replace_unencodable()
    configure_logs("workers", settings.log_level)
    asyncio.run(_run(settings))


def long_form(argument: str) -> str:
    """Return the name of the setting that a short flag stands for, with its value if it has one; else the argument."""
    flag, equals, value = argument.partition("=")
    return f"{LONG.get(flag, flag)}{equals}{value}"


async def _run(settings: WorkersSettings) -> None:
    console = Console(highlight=False)
    async with open_admin(settings) as admin:
        pool = await admin.pool()
        match settings.action:
            case "list" if settings.as_json:
                print(json.dumps(pool, indent=2))
            case "list":
                console.print(pool_view(pool, console))
            case "drain":
                _print(settings, await _drain(admin, worker_named(settings.worker, pool), settings))
            case "flip":
                _print(settings, await _flip(admin, worker_named(settings.worker, pool), settings))
            case "undrain":
                _print(settings, await admin.order(worker_named(settings.worker, pool), "undrain"))


def worker_named(name: str, pool: dict[str, Any]) -> str:
    """Return the id of the worker that has this id, or alone begins so. Raises NotFoundError with the ids there are."""
    ids: list[str] = sorted(worker["id"] for worker in pool["workers"])
    if name in ids:
        return name
    found = [each for each in ids if each.startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise NotFoundError(f"worker {name!r} is ambiguous: {', '.join(found)} begin so")
    there = f"the workers are {', '.join(ids)}" if ids else "no worker is attached"
    raise NotFoundError(f"no worker is called {name!r}{nearest(name, ids)}; {there}")


async def _drain(admin: RouterAdmin, worker: str, settings: WorkersSettings) -> dict[str, Any]:
    """Begin a drain, and wait for its end unless ``no_wait``; return the last known facts of the worker."""
    facts = await admin.order(worker, "drain", deadline=settings.deadline_seconds)
    shown = None
    while settings.wait and facts["state"] not in _OVER:
        if not settings.as_json and shown != facts["num_legs"]:
            shown = facts["num_legs"]
            print(f"{worker} drains: {shown} requests are left", flush=True)
        try:
            facts = await admin.order(worker, "drain", deadline=settings.deadline_seconds, wait=_WAIT_SECONDS)
        except NotFoundError:  # its process has ended meanwhile
            facts = {**facts, "state": "leaving"}
    return facts


async def _flip(admin: RouterAdmin, worker: str, settings: WorkersSettings) -> dict[str, Any]:
    """Let a worker take a role, and wait until it has it unless ``no_wait``; return the last known facts of the worker."""
    facts = await admin.order(worker, "flip", role=settings.role)
    while settings.wait and not (facts["role"] == settings.role and facts["state"] == "serving"):
        facts = await admin.order(worker, "flip", role=settings.role, wait=_WAIT_SECONDS)
    return facts


def _print(settings: WorkersSettings, facts: dict[str, Any]) -> None:
    if settings.as_json:
        print(json.dumps(facts, indent=2))
    else:
        print(f"{facts['id']} ({facts['role']}) is {facts['state']}")
