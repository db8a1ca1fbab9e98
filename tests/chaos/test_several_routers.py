"""Two routers share three workers; one router is killed: the requests of the other one notice nothing."""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from contract.identity import Role
from tests.chaos.clients import CONNECTION, MODEL, Answer, Api, Client, connected, mistake_in
from tests.chaos.fleet import ROUTER, Fleet, free_port, running_fleet
from tests.chaos.held_resources import until_free
from tests.chaos.settings import chaos_rng
from tests.chaos.steady import steady_answers

logger = logging.getLogger(__name__)

OTHER = "router-1"
WORKERS = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE, "decode-1": Role.DECODE}
NUM_STREAMS = 10
MAX_NUM_SEQS = 32
DEADLINE = 60.0

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(300)]


@dataclass
class Asked:
    """The answers that the clients of one router received."""

    num_whole: int = 0
    broken: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def take(self, answer: Answer, reference: Answer) -> None:
        """Count an answer."""
        if wrong := mistake_in(answer, reference, may_break=True):
            self.wrong.append(wrong)
        elif answer.is_whole:
            self.num_whole += 1
        else:
            self.broken.append(f"{answer.error_kind}: {answer.error}")


@asynccontextmanager
async def two_routers(folder: Path) -> AsyncIterator[Fleet]:
    """Run two routers on fixed ports and three workers that are attached to both."""
    flags = {"served_model_name": MODEL, "peer_timeout_seconds": 3}
    async with running_fleet(folder, **flags) as fleet:
        kinds = ("http", "grpc", "internal", "admin")
        ports = {kind: f"127.0.0.1:{free_port('127.0.0.1')}" for kind in kinds}
        await fleet.start(OTHER, Role.ROUTER, secret_file=fleet.secret_file, **ports, **flags)
        async with asyncio.TaskGroup() as tasks:
            for name, role in WORKERS.items():
                tasks.create_task(
                    fleet.start_worker(name, role, routers=(ROUTER, OTHER), max_num_seqs=MAX_NUM_SEQS)
                )
        yield fleet


async def shares(fleet: Fleet) -> dict[str, list[dict[str, Any]]]:
    """Return what each worker gives to each of its routers."""
    states = await fleet.states()
    return {name: states[name]["routers"] for name in WORKERS}


async def until_shares(fleet: Fleet, num_routers: int) -> None:
    """Wait until each worker divides its whole credit among this number of routers."""
    async with asyncio.timeout(30):
        while True:
            found = (await shares(fleet)).values()
            if all(
                len(routers) == num_routers
                and sum(router["max_requests"] for router in routers) == MAX_NUM_SEQS
                for routers in found
            ):
                return
            await asyncio.sleep(0.02)


async def keep_asking(
    client: Client, references: list[Answer], rng: random.Random, stopped: asyncio.Event, asked: Asked
) -> None:
    """Ask one question after another; after an error only once more."""
    for turn in count():
        if stopped.is_set():
            return
        reference = rng.choice(references)
        api = rng.choice((Api.GRPC, Api.HTTP_STREAM))
        salt = f"{rng.random()}.{turn}"
        answer = await client.ask(reference.question, api, timeout_seconds=DEADLINE, salt=salt)
        asked.take(answer, reference)
        if answer.error_kind == CONNECTION:
            return


async def test_a_killed_router_costs_its_own_connections_only(tmp_path: Path) -> None:
    """Law 5, and docs/elasticity.md: the survivor has the whole credit, and its answers are the right ones."""
    rng = chaos_rng("several routers")
    killed, survivor = Asked(), Asked()
    stopped = asyncio.Event()
    async with two_routers(tmp_path) as fleet:
        one, other = fleet.facts[ROUTER], fleet.facts[OTHER]
        await until_shares(fleet, 2)
        async with (
            connected(one["http"], one["grpc"]) as to_killed,
            connected(other["http"], other["grpc"]) as to_survivor,
        ):
            references = await steady_answers(to_survivor, rng, 10, answers=(20, 160))
            async with asyncio.TaskGroup() as tasks:
                for client, asked in ((to_killed, killed), (to_survivor, survivor)):
                    for _ in range(NUM_STREAMS):
                        own = random.Random(rng.getrandbits(64))
                        tasks.create_task(keep_asking(client, references, own, stopped, asked))
                while min(killed.num_whole, survivor.num_whole) < NUM_STREAMS:
                    await asyncio.sleep(0.05)
                began = time.monotonic()
                await fleet.kill(ROUTER)
                del fleet.facts[ROUTER]
                await until_shares(fleet, 1)
                logger.warning("the survivor has the whole credit %.2f s later", time.monotonic() - began)
                before = survivor.num_whole
                while survivor.num_whole < before + 2 * NUM_STREAMS:
                    await asyncio.sleep(0.05)
                await fleet.restart(ROUTER)
                await until_shares(fleet, 2)
                answer = await to_killed.ask(references[0].question, Api.HTTP_STREAM)
                assert answer.is_whole, answer.error
                assert mistake_in(answer, references[0]) is None
                stopped.set()
            assert killed.wrong == survivor.wrong == []
            assert survivor.broken == []
            assert len(killed.broken) == NUM_STREAMS
            await until_free(fleet.states, 30)


async def test_together_the_routers_never_bind_more_than_a_worker_accepts(tmp_path: Path) -> None:
    """Both have far more to do than the workers accept; the sum of what they hold is at most the credit at any time."""
    rng = chaos_rng("shared credit")
    asked, stopped = Asked(), asyncio.Event()
    async with two_routers(tmp_path) as fleet:
        await until_shares(fleet, 2)
        one, other = fleet.facts[ROUTER], fleet.facts[OTHER]
        async with (
            connected(one["http"], one["grpc"]) as first,
            connected(other["http"], other["grpc"]) as second,
        ):
            references = await steady_answers(first, rng, 6, answers=(20, 80))
            most: dict[str, int] = {}
            async with asyncio.TaskGroup() as tasks:
                for client in (first, second):
                    for _ in range(2 * MAX_NUM_SEQS):
                        own = random.Random(rng.getrandbits(64))
                        tasks.create_task(keep_asking(client, references, own, stopped, asked))
                while asked.num_whole < 8 * MAX_NUM_SEQS:
                    for name, routers in (await shares(fleet)).items():
                        num_legs = sum(router["num_requests"] for router in routers)
                        most[name] = max(most.get(name, 0), num_legs)
                    await asyncio.sleep(0.05)
                stopped.set()
            assert asked.wrong == asked.broken == []
            assert max(most.values()) <= MAX_NUM_SEQS
            assert max(most["decode-0"], most["decode-1"]) > MAX_NUM_SEQS // 2
            states = await until_free(fleet.states, 30)
            for name in WORKERS:
                assert states[name]["num_overdrawn_credits"] == 0, name
