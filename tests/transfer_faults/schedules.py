"""Random requests and random faults, many times over, on worlds that are reused.

A schedule is drawn from (seed, number) alone, and its world from the number, so it can be repeated alone.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from contract.errors import KvbatonError
from tests.transfer_faults.clients import RequestClient, Tally, draw_questions
from tests.transfer_faults.faults import WORLD_FAULTS, draw_faults, wait_a_moment
from tests.transfer_faults.world import Terrain, World, running_world

# Each pool has room for the longest prompt with its answer: a replay computes a prompt with most of the answer behind it.
TERRAINS = (
    Terrain("tcp", (40, 40)),
    Terrain("shm", (24, 24)),
    Terrain("tcp", (12, 24)),
    Terrain("shm", (24, 13)),
    Terrain("tcp", (24, 13)),
    Terrain("nixl", (24, 16)),
)
_MAX_BROKEN = 5
_World = TypeVar("_World", bound=World)
Drawn = tuple[Callable[[_World, random.Random], Awaitable[None]], int]
"""A fault of such worlds, and its weight in the draw."""


@dataclass
class Report:
    """The results of a run of schedules. broken: empty if every promise was kept."""

    seed: int
    num_schedules: int = 0
    duration_seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    tricks: Counter[str] = field(default_factory=Counter)
    cancelled_in: Counter[str] = field(default_factory=Counter)
    num_starts: int = 0
    num_flips: int = 0
    num_pulls_again: int = 0
    tally: Tally = field(default_factory=Tally)

    @property
    def wrong(self) -> list[str]:
        """The violated promises."""
        return self.tally.broken

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {**msgspec.to_builtins(self), "wrong": self.wrong}


async def run_schedules(
    seed: int, num_schedules: int, terrains: Sequence[Terrain] = TERRAINS, only: int | None = None
) -> Report:
    """Run schedules 0.. of this seed, world by world; ``only``: run one of them alone."""
    report, began = Report(seed), time.monotonic()
    numbers = range(num_schedules) if only is None else [only]
    async with asyncio.TaskGroup() as tasks:
        for index, terrain in enumerate(terrains):
            own = [number for number in numbers if number % len(terrains) == index]
            if own:
                tasks.create_task(_run_on(terrain, own, report))
    report.duration_seconds = round(time.monotonic() - began, 1)
    return report


async def _run_on(terrain: Terrain, numbers: Sequence[int], report: Report) -> None:
    async with running_world(terrain) as world:
        await run_in_world(world, WORLD_FAULTS, numbers, report)


async def run_in_world(
    world: _World, faults: Mapping[str, Drawn[_World]], numbers: Sequence[int], report: Report
) -> None:
    """Run one schedule after the other, until too many promises are broken."""
    for number in numbers:
        try:
            await _run_schedule(world, faults, report, number)
        except KvbatonError as error:
            world.tally.broken.append(error.message)
        where = f"schedule {number} of seed {report.seed} on {world.terrain.name}, faults {world.drawn}"
        report.tally.add(world.tally, where)
        world.tally = Tally()
        if len(report.wrong) >= _MAX_BROKEN or any(worker.has_failed for worker in world.workers):
            break
    report.tricks += world.control.played
    report.cancelled_in += world.cancelled_in
    report.num_flips += world.data.num_flips
    report.num_pulls_again += sum(world.pulls_again.values())
    report.num_starts += sum(worker.num_starts for worker in world.workers)


async def _run_schedule(
    world: _World, faults: Mapping[str, Drawn[_World]], report: Report, number: int
) -> None:
    rng = random.Random(f"{report.seed}:{number}")
    questions = draw_questions(rng, number)
    world.drawn = draw_faults(rng, faults, has_data_stream=world.has_data_stream)
    world.clients = [
        RequestClient(question, world.prefill, world.decode, world.tally) for question in questions
    ]
    async with asyncio.TaskGroup() as tasks:
        for client in world.clients:
            tasks.create_task(_after(rng.uniform(0, 0.04), client.ask))
        for name in world.drawn:
            tasks.create_task(_suffer(world, faults[name][0], random.Random(rng.random())))
    world.control.tricks.clear()
    world.data.flip_after_bytes = None
    await world.until_calm()
    await world.count_pulls_again()
    report.faults.update(world.drawn)
    report.num_schedules += 1


async def _after(seconds: float, act: Callable[[], Awaitable[None]]) -> None:
    await asyncio.sleep(seconds)
    await act()


async def _suffer(
    world: _World, fault: Callable[[_World, random.Random], Awaitable[None]], rng: random.Random
) -> None:
    await wait_a_moment(world, rng)
    await fault(world, rng)
