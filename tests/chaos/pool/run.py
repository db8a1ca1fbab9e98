"""Clients of every kind on a pool that is disturbed all the time: each answer must be that of an undisturbed run."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count as count_up
from pathlib import Path

import aiohttp

from tests.chaos.pool.answers import MixedAnswer, Way, ask
from tests.chaos.pool.balancer import Door
from tests.chaos.pool.grpc_answers import ask_grpc, can_be_sent
from tests.chaos.pool.leaks import Baseline, leaks_of
from tests.chaos.pool.pool import Pool, running_pool
from tests.chaos.pool.questions import MixedQuestion
from tests.chaos.pool.references import reference_answers
from tests.chaos.pool.report import PoolReport, Stream, pauses_of
from tests.chaos.pool.scripts import Happened, Script

_WARM_SECONDS = 2.0
_NEW_SECONDS = 30.0
_WAYS = (Way.STREAM, Way.STREAM, Way.WHOLE, Way.GRPC)


class Clients:
    """Sends requests to a pool until ``stopped`` is set, compares the answers, and remembers the streams' times."""

    def __init__(self, pool: Pool, references: Sequence[MixedAnswer], report: PoolReport) -> None:
        self.stopped = asyncio.Event()
        self.streams: list[Stream] = []
        self._pool = pool
        self._references = references
        self._report = report

    async def keep_asking(self, number: int, rng: random.Random) -> None:
        """Send one request after the other, each on a connection of its own."""
        async with self._pool.balancer.door("http") as web, self._pool.balancer.door("grpc") as grpc:
            for turn in count_up():
                if self.stopped.is_set():
                    return
                reference = rng.choice(self._references)
                way = rng.choice(_WAYS)
                door = grpc if way is Way.GRPC and can_be_sent(reference.question) else web
                salt = f"{number}.{turn}" if rng.random() < 0.5 else ""
                answer = await self._ask(reference, door, way, salt, is_grpc=door is grpc)
                if not answer.is_whole:
                    await asyncio.sleep(0.2)

    async def _ask(
        self, reference: MixedAnswer, door: Door, way: Way, salt: str, *, is_grpc: bool
    ) -> MixedAnswer:
        began = time.monotonic()
        num_connections = len(door.served_by)
        if is_grpc:
            answer = await ask_grpc(door.address, reference.question, salt=salt)
        else:
            answer = await _ask_http(door, reference.question, is_streamed=way is not Way.WHOLE, salt=salt)
        routers = door.served_by[num_connections:]
        deaths = [at for router in routers for at in self._pool.deaths.get(router, [])]
        self._report.take(
            answer,
            reference,
            router_died=any(began <= at for at in deaths),
            router_is_new=any(began - _NEW_SECONDS <= at for at in deaths),
        )
        if answer.arrivals:
            self.streams.append(Stream.of(answer.arrivals))
        return answer


async def _ask_http(door: Door, question: MixedQuestion, *, is_streamed: bool, salt: str) -> MixedAnswer:
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        return await ask(session, f"http://{door.address}", question, is_streamed=is_streamed, salt=salt)


@dataclass(frozen=True)
class Load:
    """The clients of a run, and the questions from which they choose."""

    num_clients: int = 32
    num_questions: int = 48
    longest_answer: int = 240


@dataclass(frozen=True)
class Sizes:
    """The numbers of processes."""

    num_routers: int
    num_prefill: int = 3
    num_decode: int = 3


class Scene:
    """A pool with the right answers to the questions that it is asked. Made by ``running_scene``."""

    def __init__(
        self, pool: Pool, references: Sequence[MixedAnswer], before: Baseline, rng: random.Random
    ) -> None:
        self._pool = pool
        self._references = references
        self._before = before
        self._rng = rng

    async def run(self, script: Script, num_clients: int) -> PoolReport:
        """Run a script under the load of these clients, and return what came of it."""
        report = PoolReport()
        clients = Clients(self._pool, self._references, report)
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(self._pool.keep_reading_moves())
            for number in range(num_clients):
                own = random.Random(self._rng.getrandbits(64))
                tasks.create_task(clients.keep_asking(number, own))
            quiet, happened = await self._play(script, report)
            clients.stopped.set()
            reading.cancel()
        report.pauses = pauses_of(clients.streams, happened, quiet, script.quiet_seconds)
        report.leaks = await leaks_of(self._pool, self._before)
        await report.count_replays(self._pool, clients.streams)
        return report

    async def _play(self, script: Script, report: PoolReport) -> tuple[float, Happened]:
        """Run a script; return when the time without events began, and what happened after it."""
        await asyncio.sleep(_WARM_SECONDS)  # the clients do not begin in step
        quiet = time.monotonic()
        await asyncio.sleep(script.quiet_seconds)  # the time without events, for comparison
        return quiet, await script.run(self._pool, self._rng, report)


@asynccontextmanager
async def running_scene(
    folder: Path, rng: random.Random, sizes: Sizes, num_questions: int, longest_answer: int
) -> AsyncIterator[Scene]:
    """Run a pool, and get the right answers from it while it is undisturbed."""
    async with running_pool(folder, sizes.num_routers, sizes.num_prefill, sizes.num_decode) as pool:
        references = await reference_answers(pool.balancer, rng, num_questions, longest_answer)
        yield Scene(pool, references, await Baseline.of(pool), rng)


async def run_pool(
    folder: Path, rng: random.Random, sizes: Sizes, script: Script, load: Load | None = None
) -> PoolReport:
    """Run one script on a pool of its own."""
    load = load or Load()
    async with running_scene(folder, rng, sizes, load.num_questions, load.longest_answer) as scene:
        return await scene.run(script, load.num_clients)
