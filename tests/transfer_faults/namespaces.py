"""Two workers on two hosts, as the kernel sees it: network namespaces joined by a cable. Needs root and iproute2.

Here packets are lost and delayed, not bytes of a relayed stream: connection attempts time out, windows close, the
kernel retransmits.
"""

import asyncio
import ctypes
import os
import random
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from contract.identity import Role
from tests.chaos.proxy import FaultyPort
from tests.transfer_faults.faults import (
    cancel_some,
    fill_pool,
    freeze_briefly,
    freeze_long,
    kill,
)
from tests.transfer_faults.framed import FramedPort
from tests.transfer_faults.schedules import Drawn, Report, run_in_world
from tests.transfer_faults.workers import Place, Worker, quiet
from tests.transfer_faults.world import Terrain, World

_NEW_NETWORK = 0x40000000
_PORTS = (7101, 7102)
TERRAIN = Terrain("tcp", (24, 24))


@dataclass(frozen=True)
class Cable:
    """Joins two namespaces, ``ends[0]`` at 10.77.0.1 and ``ends[1]`` at 10.77.0.2."""

    ends: tuple[str, str]

    @property
    def hosts(self) -> tuple[str, str]:
        """The addresses of the ends."""
        return "10.77.0.1", "10.77.0.2"

    def pull(self, end: str) -> None:
        """Drop all packets of this end; the other end gets no notice."""
        _run("ip", "-n", end, "link", "set", "eth0", "down")

    def plug(self, end: str) -> None:
        """Undo ``pull``."""
        _run("ip", "-n", end, "link", "set", "eth0", "up")

    def slow(self, end: str, kilobits: int) -> None:
        """Limit the rate of this end, and drop packets that would wait for more than 100 ms."""
        _run(
            *f"tc -n {end} qdisc replace dev eth0 root tbf rate {kilobits}kbit burst 16kb latency 100ms".split()
        )

    def speed_up(self, end: str) -> None:
        """Remove the limit, if any."""
        subprocess.run(f"tc -n {end} qdisc del dev eth0 root".split(), check=False, capture_output=True)


@dataclass
class CabledWorld(World):
    """A world whose link is the cable; the relays of ``World`` are not used."""

    cable: Cable = field(default_factory=lambda: Cable(("", "")))

    @property
    def has_data_stream(self) -> bool:
        """False: there is no stream that a relay could garble."""
        return False


async def pull_briefly(world: CabledWorld, rng: random.Random) -> None:
    """Pull the cable for less than the peers' timeout."""
    await _pull(world, rng, rng.uniform(0.02, 0.8 * world.peer_timeout_seconds))


async def pull_long(world: CabledWorld, rng: random.Random) -> None:
    """Pull the cable until each peer counts the other as dead."""
    await _pull(world, rng, world.peer_timeout_seconds + rng.uniform(0.05, 0.5))


async def _pull(world: CabledWorld, rng: random.Random, seconds: float) -> None:
    end = rng.choice(world.cable.ends)
    world.cable.pull(end)
    try:
        await asyncio.sleep(seconds)
    finally:
        world.cable.plug(end)


async def slow_down(world: CabledWorld, rng: random.Random) -> None:
    """Slow the link down, so that blocks take long and heartbeats wait behind them."""
    end = rng.choice(world.cable.ends)
    world.cable.slow(end, rng.choice((500, 2_000, 20_000)))
    try:
        await asyncio.sleep(rng.uniform(0.1, 0.5))
    finally:
        world.cable.speed_up(end)


CABLE_FAULTS: dict[str, Drawn[CabledWorld]] = {
    "pull briefly": (pull_briefly, 4),
    "pull long": (pull_long, 2),
    "slow down": (slow_down, 4),
    "kill": (kill, 1),
    "freeze briefly": (freeze_briefly, 1),
    "freeze long": (freeze_long, 1),
    "cancel some": (cancel_some, 3),
    "fill a pool": (fill_pool, 1),
}


async def run_in_namespaces(seed: int, num_schedules: int) -> Report:
    """Run schedules between two namespaces, which are removed at the end."""
    report, began = Report(seed), time.monotonic()
    with laid_cable(f"kv{os.getpid()}") as cable:
        async with _running_world(cable) as world:
            await run_in_world(world, CABLE_FAULTS, range(num_schedules), report)
    report.duration_seconds = round(time.monotonic() - began, 1)
    return report


@contextmanager
def laid_cable(name: str) -> Iterator[Cable]:
    """Create two namespaces and the cable between them."""
    cable = Cable((f"{name}a", f"{name}b"))
    try:
        for end in cable.ends:
            _run("ip", "netns", "add", end)
        _run(*f"ip link add {name}a type veth peer name {name}b".split())
        for end, host in zip(cable.ends, cable.hosts, strict=True):
            _run("ip", "link", "set", end, "netns", end)
            _run("ip", "-n", end, "link", "set", end, "name", "eth0")
            _run("ip", "-n", end, "addr", "add", f"{host}/24", "dev", "eth0")
            _run("ip", "-n", end, "link", "set", "lo", "up")
            cable.plug(end)
        yield cable
    finally:
        for end in cable.ends:
            subprocess.run(["ip", "netns", "del", end], check=False, capture_output=True)


def move_into(namespace: str) -> None:
    """Move this thread, and threads that it starts, into this namespace: their new sockets belong to it."""
    quiet()
    with Path(f"/run/netns/{namespace}").open() as handle:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(handle.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot move into namespace {namespace}")


@asynccontextmanager
async def _running_world(cable: Cable) -> AsyncIterator[CabledWorld]:
    workers = [
        Worker(role, Place(host, host, *_PORTS), TERRAIN.transport, blocks, prepare=partial(move_into, end))
        for role, host, blocks, end in zip(
            (Role.PREFILL, Role.DECODE), cable.hosts, TERRAIN.num_blocks, cable.ends, strict=True
        )
    ]
    unused = FramedPort("", "", 0), FaultyPort("", "", 0)
    try:
        for worker in workers:
            await worker.start()
        yield CabledWorld(TERRAIN, workers[0], workers[1], *unused, cable=cable)
    finally:
        for worker in workers:
            if worker.num_starts:
                await worker.shut_down()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=20)
