"""Clients of every kind on a pool that is disturbed all the time: each answer must be that of an undisturbed run."""

import asyncio
import random
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count as count_up
from pathlib import Path
from typing import Any

import aiohttp

from contract.identity import Role
from tests.chaos.held_resources import State, counted_things, until_free
from tests.chaos.pool.answers import MixedAnswer, ask
from tests.chaos.pool.pool import Pool, role_of, running_pool
from tests.chaos.pool.references import reference_answers
from tests.chaos.pool.report import PoolReport, Stream, pauses_of
from tests.chaos.pool.scripts import Script

_SLACK = 3
"""Descriptors and tasks that a process may have more at the end than any of its role had before the first event."""
_PER_PEER = 4
"""Descriptors of the links between two decode workers, which exist only after an answer has moved."""
_WARM_SECONDS = 2.0
_NEW_SECONDS = 30.0
_FREE_SECONDS = 90.0


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
        url = f"http://{self._pool.balancer.address}"
        for turn in count_up():
            if self.stopped.is_set():
                return
            reference = rng.choice(self._references)
            salt = f"{number}.{turn}" if rng.random() < 0.5 else ""
            began = time.monotonic()
            ports: list[int] = []
            connector = aiohttp.TCPConnector(force_close=True, socket_factory=_recording_sockets(ports))
            async with aiohttp.ClientSession(connector=connector) as session:
                answer = await ask(
                    session, url, reference.question, is_streamed=rng.random() < 0.7, salt=salt
                )
            router = self._pool.balancer.by_client.get(ports[-1]) if ports else None
            killed = self._pool.killed_routers.get(router or "", [])
            self._report.take(
                answer,
                reference,
                router_died=any(began <= at for at in killed),
                router_is_new=any(began - _NEW_SECONDS <= at for at in killed),
            )
            if answer.arrivals:
                self.streams.append(Stream.of(answer.arrivals))
            if not answer.is_whole:
                await asyncio.sleep(0.2)


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


async def run_pool(
    folder: Path, rng: random.Random, sizes: Sizes, script: Script, load: Load | None = None
) -> PoolReport:
    """Run a script on a pool under load, and return what came of it."""
    load = load or Load()
    report = PoolReport()
    async with running_pool(folder, sizes.num_routers, sizes.num_prefill, sizes.num_decode) as pool:
        address = pool.balancer.address
        references = await reference_answers(address, rng, load.num_questions, load.longest_answer)
        before = await pool.states()
        clients = Clients(pool, references, report)
        async with asyncio.TaskGroup() as tasks:
            for number in range(load.num_clients):
                tasks.create_task(clients.keep_asking(number, random.Random(rng.getrandbits(64))))
            await asyncio.sleep(_WARM_SECONDS)  # the clients do not begin in step
            quiet = time.monotonic()
            await asyncio.sleep(script.quiet_seconds)  # the time without events, for comparison
            happened = await script.run(pool, rng, report)
            clients.stopped.set()
        report.pauses = pauses_of(clients.streams, happened, quiet, script.quiet_seconds)
        report.leaks = await leaks_of(pool, before)
        await report.count_replays(pool)
    return report


async def leaks_of(pool: Pool, before: Mapping[str, State]) -> list[str]:
    """Wait until nothing is held, and return what still is; descriptors and tasks are compared with ``before``."""
    await pool.until_back(*pool.workers)
    limits: dict[str, dict[str, int]] = {}
    for name in pool.fleet.facts:
        same = [
            counted_things(state)
            for other, state in before.items()
            if _role(pool, other) == _role(pool, name)
        ]
        peers = _PER_PEER * (len(same) - 1) if _role(pool, name) == Role.DECODE.value else 0
        limits[name] = {thing: max(each[thing] for each in same) + _SLACK + peers for thing in same[0]}
    try:
        await until_free(pool.states, _FREE_SECONDS, at_most=limits)
    except AssertionError as error:
        return [str(error)]
    return []


def _role(pool: Pool, name: str) -> str:
    return "router" if name in pool.routers else role_of(name).value


def _recording_sockets(ports: list[int]) -> Callable[[tuple[Any, ...]], socket.socket]:
    """Return a function that makes the socket of a connection, and appends its port to ``ports``."""

    def make(address: tuple[Any, ...]) -> socket.socket:
        sock = socket.socket(*address[:3])
        sock.bind(("127.0.0.1", 0))
        ports.append(sock.getsockname()[1])
        return sock

    return make
