"""Resources that processes still hold when no request is running, read from their /debug/state."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import aiohttp

from tests.service import counter

State = dict[str, Any]


async def read_states(admins: Iterable[tuple[str, str]]) -> dict[str, State]:
    """Return /debug/state by process name; ``admins``: names with admin addresses."""
    states = {}
    async with aiohttp.ClientSession() as session:
        for name, admin in admins:
            async with session.get(f"http://{admin}/debug/state") as response:
                states[name] = await response.json()
    return states


async def read_metrics(admin: str) -> str:
    """Return the /metrics text of one process."""
    async with aiohttp.ClientSession() as session, session.get(f"http://{admin}/metrics") as response:
        return await response.text()


def count(metrics: list[str], name: str) -> float:
    """Return the sum of a counter over all labels; 0 if it has no sample yet."""
    has_sample = any(re.search(rf"^{name}[{{ ]", text, re.M) for text in metrics)
    return counter(metrics, name) if has_sample else 0.0


def resources_held(state: State) -> dict[str, Any]:
    """Return all that an idle process should not hold; empty if it is free."""
    held = _held_by_router(state) if "num_in_line" in state else _held_by_worker(state)
    return {name: value for name, value in held.items() if value}


def _held_by_router(state: State) -> dict[str, Any]:
    return {
        "requests": sum(state["requests"].values()),
        "line": state["num_in_line"],
        "tasks": state["num_tasks"],
        "legs": {w["worker_id"]: w["num_legs"] for w in state["workers"] if w["num_legs"]},
        "leg tokens": {w["worker_id"]: w["num_leg_tokens"] for w in state["workers"] if w["num_leg_tokens"]},
    }


def _held_by_worker(state: State) -> dict[str, Any]:
    connector = state["connector"]
    data = connector.get("data", {})
    return {
        "accepted": state["num_accepted"],
        "requests": state["requests"],
        "blocks": _in_use(state["blocks"]),
        "slots": _in_use(state.get("state_slots", {})),
        "holders": state["holders"],
        "leases": state["leases"],
        "fetches": connector.get("fetches"),
        "lent": connector.get("leases"),
        "quarantine": {name: n for name, n in connector.get("quarantine", {}).items() if n},
        "jobs": data.get("queued_jobs"),
        "moving": data.get("current"),
    }


def _in_use(by_state: dict[str, int]) -> dict[str, int]:
    return {name: number for name, number in by_state.items() if number and name in ("held", "quarantined")}


def _nothing_more(_states: Mapping[str, State]) -> dict[str, Any]:
    return {}


async def until_free(
    read: Callable[[], Awaitable[dict[str, State]]],
    timeout_seconds: float = 60,
    *,
    more: Callable[[Mapping[str, State]], dict[str, Any]] = _nothing_more,
) -> dict[str, State]:
    """Return the states once every process is free. more: returns what else is held, by process name.

    Raises AssertionError with what is still held after ``timeout_seconds``.
    """
    left: dict[str, Any] = {}
    try:
        async with asyncio.timeout(timeout_seconds):
            while True:
                states = await read()
                left = {name: held for name, state in states.items() if (held := resources_held(state))}
                left |= {f"{name} has grown": grown for name, grown in more(states).items()}
                if not left:
                    return states
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(f"still held after {timeout_seconds:g} s: {left}") from None
