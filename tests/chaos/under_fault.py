"""Streams on a fleet of single processes during a fault; afterwards every answer is compared."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from tests.chaos.clients import (
    CONNECTION,
    MODEL,
    Answer,
    Api,
    Client,
    connected,
    mistake_in,
)
from tests.chaos.fleet import LINK_HOST, ROUTER, WORKER_HOST, Fleet, free_port, role_of, running_fleet
from tests.chaos.held_resources import until_free
from tests.chaos.models import DEMO, ChaosModel
from tests.chaos.proxy import FaultyLink, faulty_link
from tests.chaos.steady import steady_answers

PEER_TIMEOUT = 1.0
LEASE = 2.0
DEADLINE = 60.0
TIMES: dict[str, Any] = {"peer_timeout_seconds": PEER_TIMEOUT, "lease_seconds": LEASE}


@dataclass
class Outcome:
    """The answers in one scenario. ``wrong`` names the incorrect ones."""

    num_whole: int = 0
    num_replays: float = 0
    wrong: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def take(self, answer: Answer, reference: Answer, *, may_break: bool = False) -> None:
        """Compare one answer with its reference."""
        if wrong := mistake_in(answer, reference, may_break=may_break):
            self.wrong.append(wrong)
        elif answer.is_whole:
            self.num_whole += 1
        else:
            self.errors.append(f"{answer.error_kind}: {answer.error}")


@dataclass
class Scene:
    """A fleet, and clients with the right answers."""

    fleet: Fleet
    client: Client
    references: Sequence[Answer]
    rng: random.Random

    async def during(
        self, fault: Callable[[], Awaitable[None]], num_streams: int = 6, *, may_break: bool = False
    ) -> Outcome:
        """Keep clients busy from before the fault until it is over, and once more after it.

        may_break: the fault kills the router, which breaks the connections of its clients.
        """
        outcome, over = Outcome(), asyncio.Event()
        replays_before = await self.fleet.num_replays()
        async with asyncio.TaskGroup() as tasks:
            for number in range(num_streams):
                tasks.create_task(self._keep_asking(number, over, outcome, may_break))
            await until_streaming(self.fleet)
            await fault()
            over.set()
        outcome.num_replays = await self.fleet.num_replays() - (0 if may_break else replays_before)
        return outcome

    async def _keep_asking(self, number: int, over: asyncio.Event, outcome: Outcome, may_break: bool) -> None:
        own = random.Random(f"{number}:{self.rng.random()}")
        for turn in count():
            is_last = over.is_set()
            reference = own.choice(self.references)
            api = own.choice((Api.GRPC, Api.GRPC, Api.HTTP_STREAM))
            answer = await self.client.ask(
                reference.question, api, timeout_seconds=DEADLINE, salt=f"{number}.{turn}"
            )
            outcome.take(answer, reference, may_break=may_break)
            if is_last:
                return
            if answer.error_kind == CONNECTION:
                await over.wait()

    async def until_calm(self, num_workers: int) -> None:
        """Wait until all workers are registered and nothing is held anywhere."""
        async with asyncio.timeout(30):
            while len(await self.fleet.attached()) != num_workers:
                await asyncio.sleep(0.1)
        await until_free(self.fleet.states, 30)


async def until_streaming(fleet: Fleet) -> None:
    """Wait until some answers are being streamed."""
    async with asyncio.timeout(30):
        while not (await fleet.states())[ROUTER]["requests"]["streaming"]:
            await asyncio.sleep(0.05)


def fixed_ports(host: str) -> dict[str, int]:
    """Return ports for a worker that will return on the same ones."""
    return {name: free_port(host) for name in ("port", "control_port", "data_port")}


@asynccontextmanager
async def running_scene(
    folder: Path,
    rng: random.Random,
    workers: dict[str, dict[str, Any]],
    model: ChaosModel = DEMO,
    **router_flags: Any,
) -> AsyncIterator[Scene]:
    """Run a router and these workers (name → flags; the name begins with the role); get the reference answers."""
    checkpoint = await asyncio.to_thread(model.folder, folder)
    flags = {"peer_timeout_seconds": PEER_TIMEOUT, "served_model_name": MODEL, **router_flags}
    async with running_fleet(folder, **flags) as fleet:
        async with asyncio.TaskGroup() as tasks:
            for name, given in workers.items():
                role = role_of(name)
                tasks.create_task(fleet.start_worker(name, role, model=checkpoint, **TIMES, **given))
        router = fleet.facts[ROUTER]
        async with connected(router["http"], router["grpc"]) as client:
            references = await steady_answers(client, rng, 10, checkpoint, **model.ranges(160))
            yield Scene(fleet, client, references, rng)


@asynccontextmanager
async def scene_behind_a_link(
    folder: Path, rng: random.Random, num_prefill: int = 1
) -> AsyncIterator[tuple[Scene, FaultyLink]]:
    """Run one decode worker and prefill workers, the first of which is reached over a faulty link; KV goes over tcp."""
    ports = fixed_ports(WORKER_HOST)
    linked = {"host": WORKER_HOST, "advertise_host": LINK_HOST, **ports}
    workers: dict[str, dict[str, Any]] = {"prefill-0": {"transport": "tcp", **linked}}
    workers |= {f"prefill-{number}": {"transport": "tcp"} for number in range(1, num_prefill)}
    workers["decode-0"] = {"transport": "tcp"}
    async with (
        faulty_link(LINK_HOST, WORKER_HOST, ports["port"], ports["control_port"], ports["data_port"]) as link,
        running_scene(folder, rng, workers) as scene,
    ):
        yield scene, link
