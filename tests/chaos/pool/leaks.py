"""After a run a pool may hold exactly what it held before it."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.chaos.fleet import role_of
from tests.chaos.held_resources import State, resources_held
from tests.chaos.pool.descriptors import Kinds, grown
from tests.chaos.pool.pool import Pool

_FREE_SECONDS = 90.0
_AGAIN_SECONDS = 0.5


@dataclass(frozen=True)
class Baseline:
    """The asyncio tasks and the descriptors of each process of an idle pool."""

    tasks: Mapping[str, int]
    descriptors: Mapping[str, Kinds]

    @classmethod
    async def of(cls, pool: Pool) -> "Baseline":
        """Count them now."""
        return cls(_tasks(await pool.states()), pool.descriptors())


async def leaks_of(pool: Pool, before: Baseline) -> list[str]:
    """Wait until every process holds no more than before, and return what some still do.

    A process that was not there before may have as much as another one of its role had.
    """
    await pool.until_back(*pool.workers)
    left: dict[str, Any] = {}
    try:
        async with asyncio.timeout(_FREE_SECONDS):
            while left := await _left(pool, before):
                await asyncio.sleep(_AGAIN_SECONDS)
    except TimeoutError:
        return [f"{name} still has {held}" for name, held in left.items()]
    return []


async def _left(pool: Pool, before: Baseline) -> dict[str, Any]:
    states = await pool.states()
    tasks = _tasks(states)
    left = {}
    for name, descriptors in pool.descriptors().items():
        alike = (
            [name]
            if name in before.tasks
            else [other for other in before.tasks if _are_alike(pool, name, other)]
        )
        held = resources_held(states[name])
        most = max(before.tasks[other] for other in alike)
        if tasks[name] > most:
            held["tasks"] = (most, tasks[name])
        more = [grown(descriptors, before.descriptors[other]) for other in alike]
        fewest = min(more, key=len)
        held |= fewest
        if held:
            left[name] = held
    return left


def _are_alike(pool: Pool, name: str, other: str) -> bool:
    """Return whether two workers have one role."""
    return other not in pool.routers and role_of(name) is role_of(other)


def _tasks(states: Mapping[str, State]) -> dict[str, int]:
    return {name: state["process"]["num_asyncio_tasks"] for name, state in states.items()}
