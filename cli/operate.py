"""The commands that operate a running service by the admin APIs of its routers.

``kvbaton workers`` lists the workers, lets one drain, serve again, or take another role, and lets all drop their prefix
caches or read their weights again. ``kvbaton top`` shows them again and again.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from rich.console import Console
from rich.live import Live

from cli.pool_table import pool_view
from cli.terminal import replace_unencodable
from contract.addresses import local_address
from contract.errors import KvbatonError, NotFoundError, SettingError, UnavailableError
from contract.identity import Role
from launch.arguments import parse, takes_value
from launch.client_settings import ACTIONS, OperatorSettings, TopSettings, WorkersSettings
from launch.router_admin import RouterAdmin, ServiceAdmin, admin_session
from serving import signals
from serving.logs import configure_logs
from serving.settings import listed
from serving.settings_file import nearest
from worker.router_addresses import RouterAddresses

_POLL_SECONDS = 0.2
"""The time between two readings of a worker's state. The order is sent once: another operator may undo it meanwhile."""
_OVER = ("empty", "leaving")
_SERVES = "serving"


def workers(arguments: Sequence[str]) -> None:
    """Run ``kvbaton workers``."""
    settings = _parse(arguments)
    settings.refuse_useless_flags()
    replace_unencodable()
    configure_logs("workers", settings.log_level)
    signals.run(_run(settings))


def _parse(arguments: Sequence[str]) -> WorkersSettings:
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
            case "reset-prefix-cache":
                _print_all(settings, await admin.reset_prefix_cache(), "the prefix caches of {} are dropped")
            case "reload-weights":
                reloaded = await admin.reload_weights(settings.deadline_seconds)
                _print_all(settings, reloaded, "the weights of {} are reloaded")
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
            raise KvbatonError(f"the drain of worker {worker} was cancelled; it is serving again")
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


def _print_all(settings: WorkersSettings, names: list[str], text: str) -> None:
    """Print what was done at all workers; ``text`` with their names for people."""
    shown = text.format(", ".join(names) or "no worker")
    print(json.dumps({"workers": names}, indent=2) if settings.as_json else shown)


def _print(settings: WorkersSettings, facts: dict[str, Any]) -> None:
    if settings.as_json:
        print(json.dumps(facts, indent=2))
    else:
        print(f"{facts['id']} ({facts['role']}) is {facts['state']}")


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
        # A dumb terminal (TERM=dumb, as in Emacs) cannot move its cursor: rich would draw nothing there.
        elif settings.once or not console.is_terminal or console.is_dumb_terminal:
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


@asynccontextmanager
async def open_admin(settings: OperatorSettings) -> AsyncIterator[ServiceAdmin]:
    """Open the admin APIs that the settings name. Raises SettingError if they name none."""
    addresses = await _addresses(settings)
    async with admin_session(settings.admin_key) as session:
        yield ServiceAdmin([RouterAdmin(address, session) for address in addresses])


async def _addresses(settings: OperatorSettings) -> list[str]:
    """Return the admin addresses of all routers. Raises SettingError for a ready file that cannot be used."""
    if settings.admin:
        names = listed(settings.admin)
        # A name that cannot be resolved is kept: the connection gives the reason.
        return sorted(await RouterAddresses(names).resolve()) or list(names)
    ready_file = settings.ready_file
    if ready_file is None:
        raise SettingError(
            "no router is named: give the address of its admin port (--admin HOST:PORT), or the ready file of"
            " `kvbaton up` (--ready-file FILE)",
            param="admin",
        )
    try:
        processes = json.loads(ready_file.read_text())["processes"]
        routers = [
            local_address(process["admin"]) for process in processes if process["role"] == Role.ROUTER.value
        ]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise SettingError(
            f"ready_file {ready_file} cannot be used: {error}; is `kvbaton up` running?", param="ready_file"
        ) from error
    if not routers:
        raise SettingError(f"ready_file {ready_file} names no running router", param="ready_file")
    return routers
