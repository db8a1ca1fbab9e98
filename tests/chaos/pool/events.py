"""The events that disturb a pool. Each one chooses its victims at once, and leaves the pool as it was."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager
from math import inf
from typing import Any

from contract.identity import Role
from tests.chaos.fleet import role_of
from tests.chaos.held_resources import read_states
from tests.chaos.pool.descriptors import processes_of, tcp_ports_of
from tests.chaos.pool.pool import LINKED, PEER_TIMEOUT, Pool
from tests.chaos.proxy import none

SHORT_FREEZE = 5.0
LONG_FREEZE = 60.0
"""A worker that is frozen for that long counts as dead, and is fenced when it continues."""
LONGEST = "SIGSTOP 60 s"
_CUT_SECONDS = 3.0
_STAY_SECONDS = 12.0
_FLIPPED_SECONDS = 6.0
_STOP_SECONDS = 60.0
_MOVES_SECONDS = 0.5
"""The time after the begin of a drain or a flip in which answers are being moved."""

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
        with _death(pool, victim):
            os.kill(state["engine_process"]["pid"], signal.SIGKILL)
            await pool.fleet.children[victim].wait()
    else:
        with _death(pool, victim):
            await pool.fleet.kill(victim)
    await pool.start_again(victim)


def _death(pool: Pool, victim: str) -> AbstractContextManager[None]:
    """Record the fault of a worker that is killed: a router may detect it that late, and a new process starts no sooner."""
    return pool.faults.on(victim, at_least_seconds=PEER_TIMEOUT)


def freeze_shortly(pool: Pool, rng: random.Random) -> Action | None:
    """Stop a worker by SIGSTOP for some seconds."""
    victim = pool.take(rng)
    return _freeze(pool, victim, SHORT_FREEZE) if victim else None


def freeze_long(pool: Pool, rng: random.Random) -> Action | None:
    """Stop a worker by SIGSTOP for much longer than its peers wait."""
    victim = pool.take(rng)
    return _freeze(pool, victim, LONG_FREEZE) if victim else None


async def _freeze(pool: Pool, victim: str, seconds: float) -> None:
    with pool.faults.on(victim):
        pool.fleet.freeze(victim)
        try:
            await asyncio.sleep(seconds)  # the length of the fault
        finally:
            pool.fleet.thaw(victim)
    await pool.until_back(victim)


def cut(pool: Pool, rng: random.Random) -> Action | None:
    """Cut the connections of one decode worker to one prefill worker, and refuse new ones for some seconds."""
    peers = [name for name in pool.workers if role_of(name) is Role.DECODE and name not in pool.disturbed]
    if not peers or not pool.take(rng, only=LINKED):
        return None
    return _cut(pool, rng.choice(peers))


async def _cut(pool: Pool, peer: str) -> None:
    def is_of_peer(port: int) -> bool:
        return port in tcp_ports_of(processes_of(pool.fleet.children[peer].pid))

    ports = tcp_ports_of(processes_of(pool.fleet.children[peer].pid))
    with pool.faults.on(LINKED, peer):
        for each in pool.link.kv_ports:
            each.refuses = is_of_peer
            each.cut(ports.__contains__)
        await asyncio.sleep(_CUT_SECONDS)  # the length of the fault
        for each in pool.link.kv_ports:
            each.refuses = none
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
    pair = _take_two(pool, rng)
    return _drain_two(pool, *pair) if pair else None


def _take_two(pool: Pool, rng: random.Random, role: Role | None = None) -> tuple[str, str] | None:
    """Return two victims, or None if two cannot be spared."""
    first = pool.take(rng, role=role)
    if first is None:
        return None
    second = pool.take(rng, role=role)
    if second is None:
        pool.disturbed.discard(first)
        return None
    return first, second


def kill_target(pool: Pool, rng: random.Random) -> Action | None:
    """Drain a decode worker, and kill another one that its answers move to."""
    pair = _take_two(pool, rng, Role.DECODE)
    return _kill_target(pool, *pair, rng.uniform(0.0, _MOVES_SECONDS)) if pair else None


async def _kill_target(pool: Pool, source: str, target: str, after_seconds: float) -> None:
    async def die() -> None:
        await asyncio.sleep(after_seconds)  # a moment in the middle of the moves
        with _death(pool, target):
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


def flip_in_moves(pool: Pool, rng: random.Random) -> Action | None:
    """Drain or flip a decode worker, and flip another one while answers move there."""
    pair = _take_two(pool, rng, Role.DECODE)
    if pair is None:
        return None
    return _flip_in_moves(pool, *pair, rng.uniform(0.0, _MOVES_SECONDS), by_drain=rng.random() < 0.5)


async def _flip_in_moves(
    pool: Pool, source: str, target: str, after_seconds: float, *, by_drain: bool
) -> None:
    async def flip_target() -> None:
        await asyncio.sleep(after_seconds)  # a moment in the middle of the moves
        await _flip(pool, target)

    cause = _drain(pool, source, by_signal=False) if by_drain else _flip(pool, source)
    await asyncio.gather(cause, flip_target())


def kill_router(pool: Pool, rng: random.Random) -> Action | None:
    """Kill a router with SIGKILL if another one lives, and start it again."""
    alive = [name for name in pool.routers if name not in pool.disturbed]
    if len(alive) < 2:
        return None
    victim = rng.choice(alive)
    pool.disturbed.add(victim)
    return _kill_router(pool, victim)


async def _kill_router(pool: Pool, victim: str) -> None:
    await pool.read_before_kill(victim)
    deaths = pool.deaths.setdefault(victim, [])
    deaths.append(inf)  # it may accept connections until it is dead
    await pool.fleet.kill(victim)
    deaths[-1] = time.monotonic()
    await pool.fleet.restart(victim)
    await pool.until_known_to(victim)
    pool.disturbed.discard(victim)


EVENTS: dict[str, Event] = {
    "kill -9 of a worker": kill,
    "SIGSTOP 5 s": freeze_shortly,
    LONGEST: freeze_long,
    "cut of a pair": cut,
    "drain": drain,
    "two drains at once": drain_two,
    "death of the target of a move": kill_target,
    "flip": flip,
    "flip during a move": flip_in_moves,
    "join": join,
    "kill -9 of a router": kill_router,
}
