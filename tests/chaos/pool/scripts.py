"""Scripts of a run: they disturb, shrink or restart a pool."""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import cycle
from typing import Protocol

from contract.errors import KvbatonError
from contract.identity import Role
from tests.chaos.fleet import role_of
from tests.chaos.pool.events import EVENTS, LONG_FREEZE, LONGEST, Action, Event
from tests.chaos.pool.pool import Pool
from tests.chaos.pool.report import PoolReport

logger = logging.getLogger(__name__)

Happened = list[tuple[str, float]]
"""Kinds and times of events."""
_RECOVERY_SECONDS = 180.0


class Script(Protocol):
    """Something that is done to a pool. quiet_seconds: the time before, for comparison."""

    @property
    def quiet_seconds(self) -> float:
        """The time without events before the script runs, for comparison."""

    async def run(self, pool: Pool, rng: random.Random, report: PoolReport) -> Happened:
        """Do it; return when it is over. Failures are added to the report."""


@dataclass(frozen=True)
class Disturb:
    """Begins one event after the other, each kind about as often, and ends when the last one is over.

    The longest kind goes first among equals, and does not begin again when it would outlast the script.
    """

    seconds: float
    quiet_seconds: float = 20.0
    every_seconds: float = 6.0
    events: Mapping[str, Event] = field(default_factory=lambda: EVENTS)

    async def run(self, pool: Pool, rng: random.Random, report: PoolReport) -> Happened:
        """See Script."""
        end = time.monotonic() + self.seconds
        happened: Happened = []
        async with asyncio.TaskGroup() as tasks:
            while time.monotonic() < end:
                if chosen := self._choose(pool, rng, report.events, end - time.monotonic()):
                    kind, action = chosen
                    logger.warning("chaos: %s", kind)
                    happened.append((kind, time.monotonic()))
                    report.events[kind] += 1
                    tasks.create_task(_finish(kind, action, report))
                await asyncio.sleep(self.every_seconds)  # the interval between events
        return happened

    def _choose(
        self, pool: Pool, rng: random.Random, counts: Counter[str], seconds_left: float
    ) -> tuple[str, Action] | None:
        """Return the rarest event so far that has victims now."""
        for kind in sorted(self.events, key=lambda kind: (counts[kind], kind != LONGEST, rng.random())):
            if kind == LONGEST and counts[kind] and seconds_left < LONG_FREEZE:
                continue
            if action := self.events[kind](pool, rng):
                return kind, action
        return None


@dataclass(frozen=True)
class ScaleIn:
    """Stops decode workers one after the other until one is left. every_seconds: between the stops."""

    quiet_seconds: float = 5.0
    every_seconds: float = 5.0

    async def run(self, pool: Pool, rng: random.Random, report: PoolReport) -> Happened:
        """See Script."""
        happened: Happened = []
        for name in [name for name in pool.workers if role_of(name) is Role.DECODE][1:]:
            happened.append(("scale-in", time.monotonic()))
            report.events["scale-in"] += 1
            report.exit_seconds.append(round(await pool.stop(name), 3))
            pool.forget(name)
            await asyncio.sleep(self.every_seconds)  # the interval between stops
        return happened


@dataclass(frozen=True)
class Restart:
    """Stops workers in turn and starts them again, ``count`` times: of each role one at a time, of both roles at once."""

    count: int
    quiet_seconds: float = 5.0

    async def run(self, pool: Pool, rng: random.Random, report: PoolReport) -> Happened:
        """See Script."""
        happened: Happened = []
        left = iter(range(self.count))

        async def roll(role: Role) -> None:
            names = [name for name in pool.workers if role_of(name) is role]
            for name, _ in zip(cycle(names), left, strict=False):
                happened.append(("restart", time.monotonic()))
                report.events["restart"] += 1
                report.exit_seconds.append(round(await pool.stop(name), 3))
                await pool.start_again(name)

        async with asyncio.TaskGroup() as tasks:
            for role in (Role.PREFILL, Role.DECODE):
                tasks.create_task(roll(role))
        return happened


async def _finish(kind: str, action: Action, report: PoolReport) -> None:
    """Carry out an event; a pool that does not recover is a failure of the run."""
    try:
        async with asyncio.timeout(_RECOVERY_SECONDS):
            await action
    except (AssertionError, TimeoutError, KvbatonError) as error:
        report.failed.append(f"{kind}: {error!r}")
