"""Everything that happens to a hand-over from outside. A fault is over when its function returns."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

from contract.requests import EngineRequest, SamplingParams
from engine.testing.fakes import CRASH_TOKEN
from tests.chaos.proxy import FaultyPort
from tests.transfer_faults.framed import FramedPort, Trick
from tests.transfer_faults.pool import LAYOUT
from tests.transfer_faults.workers import Worker
from tests.transfer_faults.world import World

_WORDS = ("fetch", "published", "complete", "release", "cancel", "failed")
_MOMENT_SECONDS = 0.2


class Victim(Protocol):
    """A worker that can be hit. turn: held by who kills or stops it."""

    turn: asyncio.Lock

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""

    async def start(self) -> None:
        """Start it again, on the same ports."""

    def stop(self) -> None:
        """SIGSTOP."""

    def go_on(self) -> None:
        """SIGCONT."""


class Stage(Protocol):
    """The place of faults: a link, the workers at its ends, and their timeouts.

    has_data_stream: KV crosses the link (and not only shared memory).
    """

    control: FramedPort
    data: FaultyPort
    peer_timeout_seconds: float
    lease_seconds: float

    @property
    def workers(self) -> Sequence[Victim]:
        """Both."""

    @property
    def ports(self) -> Sequence[FaultyPort]:
        """The relays."""

    @property
    def has_data_stream(self) -> bool:
        """See the class."""


async def a_moment(stage: Stage, rng: random.Random) -> None:
    """Any time soon, or just when a word of the protocol, or a byte of KV, crosses the link."""
    way = rng.random()
    with suppress(TimeoutError):
        async with asyncio.timeout(_MOMENT_SECONDS):
            if way < 0.4:
                await asyncio.sleep(rng.uniform(0, 0.06))
            elif way < 0.8 or not stage.has_data_stream:
                await stage.control.until_frame(rng.choice(_WORDS[:4]))
            else:
                stage.data.moved.clear()
                await stage.data.moved.wait()


async def kill(stage: Stage, rng: random.Random) -> None:
    """SIGKILL; it comes back on the same ports as a stranger."""
    worker = rng.choice(stage.workers)
    async with worker.turn:
        await worker.kill()
        await worker.start()


async def freeze_briefly(stage: Stage, rng: random.Random) -> None:
    """SIGSTOP for longer than a lease and shorter than the peer's patience, or for less."""
    await _freeze(rng.choice(stage.workers), _briefly(stage, rng))


async def freeze_long(stage: Stage, rng: random.Random) -> None:
    """SIGSTOP until the peer must take it for dead."""
    await _freeze(rng.choice(stage.workers), _long(stage, rng))


def _briefly(stage: Stage, rng: random.Random) -> float:
    return rng.uniform(0.02, _patience(stage))


def _patience(stage: Stage) -> float:
    """Most of what a peer waits for a sign of life."""
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
    """RST on the control link, the data connections or both, once or a few times."""
    for _ in range(rng.randint(1, 3)):
        for port in rng.choice((stage.ports, stage.ports[:1], stage.ports[1:])):
            port.cut()
        await a_moment(stage, rng)


async def hold_briefly(stage: Stage, rng: random.Random) -> None:
    """A black hole that the peers live through, though a lease may not."""
    await _hold(stage, rng, _briefly(stage, rng))


async def hold_long(stage: Stage, rng: random.Random) -> None:
    """A black hole for longer than the peers' patience: both take each other for dead."""
    await _hold(stage, rng, _long(stage, rng))


async def _hold(stage: Stage, rng: random.Random, seconds: float) -> None:
    async with _held(*rng.choice((stage.ports, stage.ports, stage.ports[:1], stage.ports[1:]))):
        await asyncio.sleep(seconds)


async def let_leases_expire(stage: Stage, rng: random.Random) -> None:
    """In the middle of a read: the bytes stand still, and no heartbeat passes until the lease is over."""
    async with _held(stage.data):
        with suppress(TimeoutError):
            async with asyncio.timeout(_MOMENT_SECONDS):
                await stage.control.until_frame("published")
        async with _held(stage.control):
            await asyncio.sleep(rng.uniform(stage.lease_seconds, _patience(stage)))
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
    """Every chunk and every frame is late."""
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
    """Frames of the control link come twice, at once or late."""
    await _play(stage, rng, "repeat")


async def swap_words(stage: Stage, rng: random.Random) -> None:
    """Frames of the control link come after the ones behind them."""
    await _play(stage, rng, "swap")


async def _play(stage: Stage, rng: random.Random, way: str) -> None:
    for _ in range(rng.randint(1, 3)):
        kind, after = rng.choice((*_WORDS, None)), rng.choice((0, 0, 1, 3))
        stage.control.tricks.append(Trick("swap" if way == "swap" else "repeat", kind, after))
    await asyncio.sleep(rng.uniform(0, 0.1))


async def cancel_some(world: World, rng: random.Random) -> None:
    """Clients leave, in whatever state their requests are."""
    if not world.askers:
        return
    for asker in rng.sample(world.askers, rng.randint(1, len(world.askers))):
        if asker.is_over:
            continue
        looks = [asyncio.create_task(worker.state()) for worker in world.workers]
        await asyncio.sleep(0)  # the workers get the requests before the faults
        await asker.cancel()
        name = asker.question.request_id
        for state, desk in zip(await asyncio.gather(*looks), ("leases", "fetches"), strict=True):
            world.cancelled_in[_state_of(state, desk, name)] += 1


def _state_of(state: dict[str, Any], desk: str, request_id: str) -> str:
    rows = state["connector"][desk] if state else []
    for row in rows:
        if str(row["request"]).startswith(f"{request_id}#") or f"t-{request_id}" in row["transfer_id"]:
            return f"{desk} {row['state']}"
    return f"{desk} none"


async def fill_pool(world: World, rng: random.Random) -> None:
    """Other requests take a worker's blocks for a while: it runs out of them."""
    await _fill(world, rng.choice(world.workers), rng, rng.uniform(0.01, 0.15))


async def leave_while_reading(world: World, rng: random.Random) -> None:
    """The bytes stand still, the clients leave, others get what blocks are free, and then the bytes come."""
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
"""Name → fault and how often it is drawn, relative to the others."""
WORLD_FAULTS: dict[str, tuple[WorldFault, int]] = {
    **FAULTS,
    "let leases expire": (let_leases_expire, 2),
    "cancel some": (cancel_some, 4),
    "fill a pool": (fill_pool, 2),
    "leave while reading": (leave_while_reading, 2),
}
"""The same, with those that need to know the workers' requests, or leases that end before a peer's patience."""


def draw_faults(
    rng: random.Random, faults: Mapping[str, tuple[object, int]], *, has_data_stream: bool
) -> list[str]:
    """Names of one to three. Without a stream of data there is nothing to garble."""
    names = [name for name in faults if name != "garble" or has_data_stream]
    return rng.choices(names, [faults[name][1] for name in names], k=rng.randint(1, 3))
