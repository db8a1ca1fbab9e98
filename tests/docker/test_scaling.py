"""A compose stack that is scaled while it serves, on a real engine: no answer fails and no token changes."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.clients import MODEL, Answer, Api, Client, connected
from tests.chaos.settings import chaos_rng
from tests.chaos.steady import steady_answers
from tests.chaos.under_fault import Outcome
from tests.docker.stack import Stack, admin_page, debug_state, running_stack, watched_exits
from tests.service import counter

pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]

NUM_CLIENTS = 8
COMPARABLE = (f"KVBATON_SERVED_MODEL_NAME={MODEL}", "KVBATON_DTYPE=float32", "KVBATON_NUM_THREADS=1")
SMALL_POOLS = f"KVBATON_KV_CACHE_BYTES={64 * 2**20}"


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with running_stack(*COMPARABLE, SMALL_POOLS) as running:
        yield running


@asynccontextmanager
async def client_of(stack: Stack, router: int = 1) -> AsyncIterator[Client]:
    """Connect a client to the published ports of the router with this number."""
    async with connected(stack.published(8000, router), stack.published(9000, router)) as client:
        yield client


async def load_during(
    clients: Sequence[Client],
    references: Sequence[Answer],
    rng: random.Random,
    change: Callable[[], Awaitable[None]],
) -> Outcome:
    """Keep clients busy from before a change until after it; every answer is compared."""
    outcome = Outcome()
    over = asyncio.Event()

    async def keep_asking(number: int) -> None:
        own = random.Random(rng.getrandbits(64))
        for turn in count():
            is_last = over.is_set()
            reference = own.choice(references)
            api = own.choice((Api.GRPC, Api.HTTP_STREAM))
            answer = await clients[number % len(clients)].ask(
                reference.question, api, salt=f"{number}.{turn}"
            )
            outcome.take(answer, reference)
            if is_last:
                return

    async with asyncio.TaskGroup() as tasks:
        for number in range(NUM_CLIENTS):
            tasks.create_task(keep_asking(number))
        await until(lambda: outcome.num_whole > 0)
        await change()
        over.set()
    return outcome


async def until(is_so: Callable[[], bool]) -> None:
    """Wait until something is so, at most five minutes."""
    async with asyncio.timeout(300):
        while not await asyncio.to_thread(is_so):
            await asyncio.sleep(0.1)


async def scaled(stack: Stack, **numbers: int) -> None:
    """Scale services, as docs/docker.md does it."""
    scales = [f"--scale={service}={number}" for service, number in numbers.items()]
    await asyncio.to_thread(stack.up, *scales)


def router_states(stack: Stack) -> list[dict[str, Any]]:
    """Return the state of every router."""
    return [debug_state(container) for container in stack.containers("router")]


def attached(state: dict[str, Any]) -> int:
    """Return the number of workers that a router counts as available."""
    return sum(worker["max_requests"] > 0 for worker in state["workers"])


async def test_scaling_in_loses_nothing(stack: Stack, tmp_path: Path) -> None:
    """From three decode workers to one: both leave empty, long before they would be killed, and their answers move."""
    rng = chaos_rng("docker, scaling in")
    await scaled(stack, decode=3)
    await until(lambda: attached(router_states(stack)[0]) == 4)
    async with client_of(stack) as client:
        references = await steady_answers(client, rng, 10, answers=(100, 300))
        with watched_exits("decode", tmp_path) as exit_codes:
            outcome = await load_during([client], references, rng, lambda: scaled(stack, decode=1))
            await until(lambda: exit_codes() == [0, 0])
    assert (outcome.wrong, outcome.errors) == ([], [])
    assert len(stack.containers("decode")) == 1
    [page] = [admin_page(container, "/metrics") for container in stack.containers("router")]
    assert counter([page], "kvbaton_drains_total", result="empty") == 2
    assert counter([page], "kvbaton_migrations_total", result="moved") > 0


async def test_a_second_router_comes_and_goes(stack: Stack, tmp_path: Path) -> None:
    """The workers find it by the name that both have, divide their credit, and give the other one all of it again."""
    rng = chaos_rng("docker, routers")
    async with client_of(stack) as first:
        references = await steady_answers(first, rng, 10, answers=(20, 160))
        grown = await load_during([first], references, rng, lambda: scaled(stack, router=2))
        await until(lambda: [attached(state) for state in router_states(stack)] == [2, 2])
        async with client_of(stack, 2) as second:

            async def both_have_answered() -> None:
                await until(lambda: all(sum(state["requests"].values()) for state in router_states(stack)))

            shared = await load_during([first, second], references, rng, both_have_answered)
        with watched_exits("router", tmp_path) as exit_codes:
            shrunk = await load_during([first], references, rng, lambda: scaled(stack, router=1))
            await until(lambda: exit_codes() == [0])
    for outcome in (grown, shared, shrunk):
        assert (outcome.wrong, outcome.errors) == ([], [])
    workers = stack.containers("prefill") + stack.containers("decode")
    await until(lambda: all(len(debug_state(worker)["routers"]) == 1 for worker in workers))
