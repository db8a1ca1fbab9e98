"""The events that disturb a pool. Each one chooses its victims at once, and leaves the pool as it was."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any

from contract.identity import Role
from tests.chaos.held_resources import read_states
from tests.chaos.pool.pool import LINKED, Pool, role_of

SHORT_FREEZE = 5.0
LONG_FREEZE = 60.0
"""A worker that is frozen for that long counts as dead, and is fenced when it continues."""
_CUT_SECONDS = 3.0
_STAY_SECONDS = 12.0
_FLIPPED_SECONDS = 6.0
_STOP_SECONDS = 60.0

Action = Coroutine[Any, Any, None]
Event = Callable[[Pool, random.Random], Action | None]
"""Returns what happens to the victims, who are disturbed from now on; None if no victim can be spared."""


def kill(pool: Pool, rng: random.Random) -> Action | None:
    """Kill a worker with SIGKILL, or only its engine, and start it again."""
    victim = pool.take(rng)
    return _kill(pool, victim, is_engine=rng.random() < 0.3) if victim else None


async def _kill(pool: Pool, victim: str, *, is_engine: bool) -> None:
    if is_engine:
        state = (await read_states([(victim, pool.fleet.facts[victim]["admin"])]))[victim]
        os.kill(state["engine_process"]["pid"], signal.SIGKILL)
        await pool.fleet.children[victim].wait()
    else:
        await pool.fleet.kill(victim)
    await pool.start_again(victim)


def freeze_shortly(pool: Pool, rng: random.Random) -> Action | None:
    """Stop a worker by SIGSTOP for some seconds."""
    victim = pool.take(rng)
    return _freeze(pool, victim, SHORT_FREEZE) if victim else None


def freeze_long(pool: Pool, rng: random.Random) -> Action | None:
    """Stop a worker by SIGSTOP for much longer than its peers wait."""
    victim = pool.take(rng)
    return _freeze(pool, victim, LONG_FREEZE) if victim else None


async def _freeze(pool: Pool, victim: str, seconds: float) -> None:
    pool.fleet.freeze(victim)
    try:
        await asyncio.sleep(seconds)  # the length of the fault
    finally:
        pool.fleet.thaw(victim)
    await pool.until_back(victim)


def cut(pool: Pool, rng: random.Random) -> Action | None:
    """Cut the connections of other workers to one prefill worker, and refuse new ones for some seconds."""
    return _cut(pool) if pool.take(rng, only=LINKED) else None


async def _cut(pool: Pool) -> None:
    for port in pool.link.kv_ports:
        port.is_refusing = True
        port.cut()
    await asyncio.sleep(_CUT_SECONDS)  # the length of the fault
    for port in pool.link.kv_ports:
        port.is_refusing = False
    await pool.until_back(LINKED)


def join(pool: Pool, rng: random.Random) -> Action | None:
    """Add a worker of either role, which leaves after some seconds by SIGTERM."""
    name = rng.choice(("prefill-9", "decode-9"))
    if name in pool.disturbed:
        return None
    pool.disturbed.add(name)
    return _join(pool, name)


async def _join(pool: Pool, name: str) -> None:
    await pool.start_worker(name)
    await asyncio.sleep(_STAY_SECONDS)  # the time for which it works
    await pool.stop(name)
    pool.forget(name)


def drain(pool: Pool, rng: random.Random) -> Action | None:
    """Drain a worker: by SIGTERM, and start it again, or by the router's admin API, and undo it."""
    victim = pool.take(rng)
    return _drain(pool, victim, by_signal=rng.random() < 0.5) if victim else None


def drain_two(pool: Pool, rng: random.Random) -> Action | None:
    """Drain two workers at the same time."""
    first = pool.take(rng)
    if first is None:
        return None
    second = pool.take(rng)
    if second is None:
        pool.disturbed.discard(first)
        return None
    return _drain_two(pool, first, second)


def kill_target(pool: Pool, rng: random.Random) -> Action | None:
    """Drain a decode worker, and kill another one that its answers move to."""
    source = pool.take(rng, role=Role.DECODE)
    if source is None:
        return None
    target = pool.take(rng, role=Role.DECODE)
    if target is None:
        pool.disturbed.discard(source)
        return None
    return _kill_target(pool, source, target, rng.uniform(0.0, 0.5))


async def _kill_target(pool: Pool, source: str, target: str, after_seconds: float) -> None:
    async def die() -> None:
        await asyncio.sleep(after_seconds)  # a moment in the middle of the moves
        await pool.fleet.kill(target)
        await pool.start_again(target)

    await asyncio.gather(_drain(pool, source, by_signal=False), die())


async def _drain_two(pool: Pool, first: str, second: str) -> None:
    await asyncio.gather(_drain(pool, first, by_signal=True), _drain(pool, second, by_signal=False))


async def _drain(pool: Pool, victim: str, *, by_signal: bool) -> None:
    if by_signal:
        await pool.stop(victim)
        await pool.start_again(victim)
        return
    status, facts = await pool.order(victim, f"drain?wait={_STOP_SECONDS:g}")
    assert (status, facts.get("state")) == (200, "empty"), f"drain of {victim}: {status} {facts}"
    status, facts = await pool.order(victim, "undrain")
    assert status == 200, f"undrain of {victim}: {status} {facts}"
    await pool.until_back(victim)


def flip(pool: Pool, rng: random.Random) -> Action | None:
    """Let a worker take the other role, and some seconds later its own again."""
    victim = pool.take(rng)
    return _flip(pool, victim) if victim else None


async def _flip(pool: Pool, victim: str) -> None:
    own = role_of(victim)
    for role in (Role.DECODE if own is Role.PREFILL else Role.PREFILL, own):
        status, facts = await pool.order(victim, f"flip?role={role.value}&wait={_STOP_SECONDS:g}")
        assert (status, facts.get("role")) == (200, role.value), f"flip of {victim}: {status} {facts}"
        await asyncio.sleep(_FLIPPED_SECONDS)  # the time for which it has the role
    await pool.until_back(victim)


def kill_router(pool: Pool, rng: random.Random) -> Action | None:
    """Kill a router with SIGKILL if another one lives, and start it again."""
    alive = [name for name in pool.routers if name not in pool.disturbed]
    if len(alive) < 2:
        return None
    victim = rng.choice(alive)
    pool.disturbed.add(victim)
    return _kill_router(pool, victim)


async def _kill_router(pool: Pool, victim: str) -> None:
    pool.killed_routers.setdefault(victim, []).append(time.monotonic())
    await pool.fleet.kill(victim)
    await pool.fleet.restart(victim)
    await pool.until_known_to(victim)
    pool.disturbed.discard(victim)


EVENTS: dict[str, Event] = {
    "kill -9 of a worker": kill,
    "SIGSTOP 5 s": freeze_shortly,
    "SIGSTOP 60 s": freeze_long,
    "cut of a pair": cut,
    "drain": drain,
    "two drains at once": drain_two,
    "death of the target of a move": kill_target,
    "flip": flip,
    "join": join,
    "kill -9 of a router": kill_router,
}
