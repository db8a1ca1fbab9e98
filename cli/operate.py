"""``kvbaton workers``: lists the workers of a running service, and lets one drain, serve again, or take another role."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from cli.pool_table import pool_view
from cli.router_admin import open_admin
from cli.terminal import replace_unencodable
from contract.errors import KvbatonError, NotFoundError
from launch.arguments import parse, takes_value
from launch.operator_settings import ACTIONS, WorkersSettings
from launch.router_admin import ServiceAdmin
from serving import signals
from serving.logs import configure_logs
from serving.settings_file import nearest

_POLL_SECONDS = 0.2
"""The time between two readings of a worker's state. The order is sent once: another operator may undo it meanwhile."""
_OVER = ("empty", "leaving")
_SERVES = "serving"


def workers(arguments: Sequence[str]) -> None:
    """Run ``kvbaton workers``."""
    settings = _parsed(arguments)
    settings.refuse_useless_flags()
    replace_unencodable()
    configure_logs("workers", settings.log_level)
    signals.run(_run(settings))


def _parsed(arguments: Sequence[str]) -> WorkersSettings:
    """Read the settings of the action that the arguments name, each of which has a help and flags of its own."""
    for position, word in enumerate(arguments):
        is_value = position > 0 and takes_value(WorkersSettings, arguments[position - 1])
        if word in ACTIONS and not is_value:
            rest = [*arguments[:position], *arguments[position + 1 :]]
            return parse(ACTIONS[word], f"kvbaton workers {word}", rest)
    return parse(WorkersSettings, "kvbaton workers", arguments)


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


async def _drain(admin: ServiceAdmin, worker: str, settings: WorkersSettings) -> dict[str, Any]:
    """Begin a drain, and wait for its end unless ``no_wait``; return the last known facts of the worker.

    Raises KvbatonError if the drain is undone meanwhile.
    """
    facts = await admin.order(worker, "drain", deadline=settings.deadline_seconds)
    shown = None
    while settings.wait and facts["state"] not in _OVER:
        if facts["state"] == _SERVES:
            raise KvbatonError(f"worker {worker} serves again: its drain was undone")
        if not settings.as_json and shown != facts["num_legs"]:
            shown = facts["num_legs"]
            print(f"{worker} drains: {shown} requests are left", flush=True)
        await asyncio.sleep(_POLL_SECONDS)
        facts = await _facts_of(worker, admin) or {**facts, "state": "leaving"}  # its process has ended
    return facts


async def _flip(admin: ServiceAdmin, worker: str, settings: WorkersSettings) -> dict[str, Any]:
    """Let a worker take a role, and wait until it has it unless ``no_wait``; return the last known facts of the worker.

    Raises KvbatonError if the change is undone meanwhile, NotFoundError if the worker leaves.
    """
    facts = await admin.order(worker, "flip", role=settings.role)
    while settings.wait and not (facts["role"] == settings.role and facts["state"] == _SERVES):
        if facts["state"] == _SERVES:
            raise KvbatonError(f"worker {worker} is still a {facts['role']} worker: the change was undone")
        await asyncio.sleep(_POLL_SECONDS)
        known = await _facts_of(worker, admin)
        if known is None:
            raise NotFoundError(f"worker {worker} has left before it became a {settings.role} worker")
        facts = known
    return facts


async def _facts_of(worker: str, admin: ServiceAdmin) -> dict[str, Any] | None:
    """Return a worker's entry of the list; None if it is not attached."""
    listed: list[dict[str, Any]] = (await admin.pool())["workers"]
    return next((each for each in listed if each["id"] == worker), None)


def _print(settings: WorkersSettings, facts: dict[str, Any]) -> None:
    if settings.as_json:
        print(json.dumps(facts, indent=2))
    else:
        print(f"{facts['id']} ({facts['role']}) is {facts['state']}")
