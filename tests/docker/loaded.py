"""Clients of a compose stack whose answers are compared, while the stack changes."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from tests.chaos.clients import MODEL, Answer, Api, Client, connected
from tests.chaos.under_fault import Outcome
from tests.docker.stack import Stack, debug_state

NUM_CLIENTS = 8
COMPARABLE = (f"KVBATON_SERVED_MODEL_NAME={MODEL}", "KVBATON_DTYPE=float32", "KVBATON_NUM_THREADS=1")
SMALL_POOLS = f"KVBATON_KV_CACHE_BYTES={64 * 2**20}"


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
    *,
    num_clients: int = NUM_CLIENTS,
    pause_seconds: float = 0.0,
) -> Outcome:
    """Keep clients busy from before a change until after it; every answer is compared. pause_seconds: between answers."""
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
            await asyncio.sleep(pause_seconds)

    async with asyncio.TaskGroup() as tasks:
        for number in range(num_clients):
            tasks.create_task(keep_asking(number))
        await until(lambda: outcome.num_whole > 0)
        await change()
        over.set()
    return outcome


async def until(is_so: Callable[[], bool], seconds: float = 300) -> None:
    """Wait until something is so, at most five minutes."""
    await until_async(lambda: asyncio.to_thread(is_so), seconds)


async def until_async(is_so: Callable[[], Awaitable[bool]], seconds: float = 300) -> None:
    """Wait until something that a coroutine finds out is so. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not await is_so():
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
