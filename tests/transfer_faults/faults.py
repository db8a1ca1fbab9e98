"""All external faults of a hand-over. A fault is over when its function returns."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

from contract.requests import EngineRequest
from contract.sampling import SamplingParams
from tests.chaos.proxy import FaultyPort
from tests.fakes.engine.fakes import CRASH_TOKEN
from tests.transfer_faults.framed import FramedPort, Trick
from tests.transfer_faults.pool import LAYOUT
from tests.transfer_faults.workers import Worker
from tests.transfer_faults.world import World

_FRAME_KINDS = ("fetch", "published", "complete", "release", "cancel", "failed")
_MOMENT_SECONDS = 0.2


class Victim(Protocol):
    """A worker that faults can hit. turn: held while it is killed or stopped."""

    turn: asyncio.Lock

    async def kill(self) -> None:
        """Kill it with SIGKILL, and wait until it is gone."""

    async def start(self) -> None:
        """Start it again, on the same ports."""

    def stop(self) -> None:
        """Send SIGSTOP."""

    def go_on(self) -> None:
        """Send SIGCONT."""


class Stage(Protocol):
    """The place of faults: a link, the workers at its ends, and their timeouts.

    has_data_stream: KV crosses the link, not only shared memory.
    """

    control: FramedPort
    data: FaultyPort
    peer_timeout_seconds: float
    lease_seconds: float

    @property
    def workers(self) -> Sequence[Victim]:
        """Both workers."""

    @property
    def ports(self) -> Sequence[FaultyPort]:
        """The relays."""

    @property
    def has_data_stream(self) -> bool:
        """True if KV crosses the link."""


async def wait_a_moment(stage: Stage, rng: random.Random) -> None:
    """Wait a random time, or until a frame of the protocol or a byte of KV crosses the link."""
    share = rng.random()
    with suppress(TimeoutError):
        async with asyncio.timeout(_MOMENT_SECONDS):
            if share < 0.4:
                await asyncio.sleep(rng.uniform(0, 0.06))
            elif share < 0.8 or not stage.has_data_stream:
                await stage.control.until_frame(rng.choice(_FRAME_KINDS[:4]))
            else:
                stage.data.moved.clear()
                await stage.data.moved.wait()


async def kill(stage: Stage, rng: random.Random) -> None:
    """Kill a worker; it returns on the same ports with another boot id."""
    worker = rng.choice(stage.workers)
    async with worker.turn:
        await worker.kill()
        await worker.start()


async def freeze_briefly(stage: Stage, rng: random.Random) -> None:
    """Stop a worker for less than the peer's timeout; a lease may expire."""
    await _freeze(rng.choice(stage.workers), _briefly(stage, rng))


async def freeze_long(stage: Stage, rng: random.Random) -> None:
    """Stop a worker until the peer must count it as dead."""
    await _freeze(rng.choice(stage.workers), _long(stage, rng))


def _briefly(stage: Stage, rng: random.Random) -> float:
    return rng.uniform(0.02, _most_of_timeout(stage))


def _most_of_timeout(stage: Stage) -> float:
    """Return most of the time that a peer waits for a sign of life."""
    return 0.8 * stage.peer_timeout_seconds


def _long(stage: Stage, rng: random.Random) -> float:
    return stage.peer_timeout_seconds + rng.uniform(0.05, 0.3) + rng.choice((0.0, stage.lease_seconds))


async def _freeze(worker: Victim, seconds: float) -> None:
    async with worker.turn:
        worker.stop()
        try:
            await asyncio.sleep(seconds)
        finally:
            worker.go_on()


async def cut(stage: Stage, rng: random.Random) -> None:
    """Reset the control link, the data connections or both, once or a few times."""
    for _ in range(rng.randint(1, 3)):
        for port in rng.choice((stage.ports, stage.ports[:1], stage.ports[1:])):
            port.cut()
        await wait_a_moment(stage, rng)


async def hold_briefly(stage: Stage, rng: random.Random) -> None:
    """Hold all bytes for a time that the peers survive, though a lease may not."""
    await _hold(stage, rng, _briefly(stage, rng))


async def hold_long(stage: Stage, rng: random.Random) -> None:
    """Hold all bytes for longer than the peers' timeout: each counts the other as dead."""
    await _hold(stage, rng, _long(stage, rng))


async def _hold(stage: Stage, rng: random.Random, seconds: float) -> None:
    async with _held(*rng.choice((stage.ports, stage.ports, stage.ports[:1], stage.ports[1:]))):
        await asyncio.sleep(seconds)


async def let_leases_expire(stage: Stage, rng: random.Random) -> None:
    """Hold the bytes in the middle of a read, and all heartbeats until the lease is over."""
    async with _held(stage.data):
        with suppress(TimeoutError):
            async with asyncio.timeout(_MOMENT_SECONDS):
                await stage.control.until_frame("published")
        async with _held(stage.control):
            await asyncio.sleep(rng.uniform(stage.lease_seconds, _most_of_timeout(stage)))
        if rng.random() < 0.5:
            await asyncio.sleep(rng.uniform(0, stage.lease_seconds))


@asynccontextmanager
async def _held(*ports: FaultyPort) -> AsyncIterator[None]:
    for port in ports:
        port.hold()
    try:
        yield
    finally:
        for port in ports:
            port.release()


async def slow_down(stage: Stage, rng: random.Random) -> None:
    """Delay every chunk and every frame."""
    delay = rng.choice((0.002, 0.01, 0.05))
    for port in stage.ports:
        port.delay_seconds = delay
    try:
        await asyncio.sleep(rng.uniform(0.05, 0.3))
    finally:
        for port in stage.ports:
            port.delay_seconds = 0.0


async def garble(stage: Stage, rng: random.Random) -> None:
    """Flip one bit of what the sender sends on its data connections."""
    stage.data.flip_after_bytes = rng.randrange(rng.choice((200, 100_000)))


async def repeat_words(stage: Stage, rng: random.Random) -> None:
    """Repeat frames of the control link, at once or later."""
    await _play(stage, rng, "repeat")


async def swap_words(stage: Stage, rng: random.Random) -> None:
    """Swap frames of the control link with the next ones."""
    await _play(stage, rng, "swap")


async def _play(stage: Stage, rng: random.Random, action: str) -> None:
    for _ in range(rng.randint(1, 3)):
        kind, after = rng.choice((*_FRAME_KINDS, None)), rng.choice((0, 0, 1, 3))
        stage.control.tricks.append(Trick("swap" if action == "swap" else "repeat", kind, after))
    await asyncio.sleep(rng.uniform(0, 0.1))


async def cancel_some(world: World, rng: random.Random) -> None:
    """Cancel some requests, in any state."""
    if not world.clients:
        return
    for client in rng.sample(world.clients, rng.randint(1, len(world.clients))):
        if client.is_over:
            continue
        looks = [asyncio.create_task(worker.state()) for worker in world.workers]
        await asyncio.sleep(0)  # sends the state requests before the cancellations
        await client.cancel()
        name = client.question.request_id
        for state, table in zip(await asyncio.gather(*looks), ("leases", "fetches"), strict=True):
            world.cancelled_in[_state_of(state, table, name)] += 1


def _state_of(state: dict[str, Any], table: str, request_id: str) -> str:
    rows = state["connector"][table] if state else []
    for row in rows:
        if str(row["request"]).startswith(f"{request_id}#") or f"t-{request_id}" in row["transfer_id"]:
            return f"{table} {row['state']}"
    return f"{table} none"


async def fill_pool(world: World, rng: random.Random) -> None:
    """Use up a worker's blocks with other requests for a while."""
    await _fill(world, rng.choice(world.workers), rng, rng.uniform(0.01, 0.15))


async def cancel_while_reading(world: World, rng: random.Random) -> None:
    """Hold the bytes, cancel requests, let others take the free blocks, and then let the bytes pass."""
    world.data.lets_answers_pass.clear()
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(_MOMENT_SECONDS):
                await world.control.until_frame("published")
                await asyncio.sleep(rng.choice((0.0, 0.01)))
        await cancel_some(world, rng)
        filling = asyncio.create_task(_fill(world, world.decode, rng, 0.2))
        await asyncio.sleep(rng.uniform(0.01, 0.1))
    finally:
        world.data.lets_answers_pass.set()
    await filling


async def _fill(world: World, worker: Worker, rng: random.Random, seconds: float) -> None:
    if not worker.is_up.is_set():
        return
    num_tokens = LAYOUT.block_size * (worker.num_blocks - 1) // 2
    names = [f"filler-{rng.randrange(2**32)}" for _ in range(3)]
    for name in names:
        request = EngineRequest(
            request_id=name,
            prompt_token_ids=[rng.randrange(CRASH_TOKEN) for _ in range(num_tokens)],
            sampling=SamplingParams(max_tokens=num_tokens - 1, ignore_eos=True),
        )
        world.others.append(asyncio.create_task(worker.run(request, lambda _output: None)))
    await asyncio.sleep(seconds)
    for name in names:
        if worker.is_up.is_set():
            await worker.abort(name)


Fault = Callable[[Stage, random.Random], Awaitable[None]]
WorldFault = Callable[[World, random.Random], Awaitable[None]]

FAULTS: dict[str, tuple[Fault, int]] = {
    "kill": (kill, 1),
    "freeze briefly": (freeze_briefly, 2),
    "freeze long": (freeze_long, 1),
    "cut": (cut, 3),
    "hold briefly": (hold_briefly, 2),
    "hold long": (hold_long, 1),
    "slow down": (slow_down, 2),
    "garble": (garble, 3),
    "repeat words": (repeat_words, 3),
    "swap words": (swap_words, 3),
}
"""Name → fault, and its weight in the draw."""
WORLD_FAULTS: dict[str, tuple[WorldFault, int]] = {
    **FAULTS,
    "let leases expire": (let_leases_expire, 2),
    "cancel some": (cancel_some, 4),
    "fill a pool": (fill_pool, 2),
    "leave while reading": (cancel_while_reading, 2),
}
"""All faults, with those that need the requests of the workers, or leases that expire before a peer's timeout."""


def draw_faults(
    rng: random.Random, faults: Mapping[str, tuple[object, int]], *, has_data_stream: bool
) -> list[str]:
    """Draw one to three names. Without a data stream nothing can be garbled."""
    names = [name for name in faults if name != "garble" or has_data_stream]
    return rng.choices(names, [faults[name][1] for name in names], k=rng.randint(1, 3))
