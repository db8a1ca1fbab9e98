"""A prefill and a decode worker joined by a link that fails on demand."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from contract.identity import Role
from tests.chaos.fleet import LINK_HOST, WORKER_HOST, free_port
from tests.chaos.proxy import FaultyPort
from tests.transfer_faults.clients import RequestClient, Tally
from tests.transfer_faults.framed import FramedPort
from tests.transfer_faults.workers import LEASE, PEER_TIMEOUT, Place, Worker

_CALM_SECONDS = 15.0


@dataclass(frozen=True)
class Terrain:
    """The dimensions of a world. num_blocks: of each pool, prefill and decode; one is the null block."""

    transport: str
    num_blocks: tuple[int, int]

    @property
    def name(self) -> str:
        """A readable name."""
        return f"{self.transport}, pools of {self.num_blocks[0]} and {self.num_blocks[1]}"


@dataclass
class World:
    """Two workers, the relays between them, and the current requests; ``others``: legs that belong to no client.

    pulls_again: reads that followed a failed one, for each incarnation of the decode worker.
    """

    terrain: Terrain
    prefill: Worker
    decode: Worker
    control: FramedPort
    data: FaultyPort
    tally: Tally = field(default_factory=Tally)
    clients: list[RequestClient] = field(default_factory=list)
    others: list[asyncio.Task[None]] = field(default_factory=list)
    drawn: list[str] = field(default_factory=list)
    cancelled_in: Counter[str] = field(default_factory=Counter)
    pulls_again: dict[str, int] = field(default_factory=dict)

    peer_timeout_seconds: float = PEER_TIMEOUT
    lease_seconds: float = LEASE

    @property
    def has_data_stream(self) -> bool:
        """True if KV crosses the link."""
        return self.terrain.transport == "tcp"

    @property
    def workers(self) -> tuple[Worker, Worker]:
        """Both workers."""
        return self.prefill, self.decode

    @property
    def ports(self) -> Sequence[FaultyPort]:
        """The relays."""
        return self.control, self.data

    async def until_calm(self) -> None:
        """Wait until every leg has ended and nothing is held, lent, fetched or quarantined on either side."""
        legs = [*self.others, *(leg for client in self.clients for leg in client.legs)]
        done, stuck = await asyncio.wait(legs, timeout=_CALM_SECONDS) if legs else (set(), set())
        for leg in done:
            leg.result()
        if stuck:
            self.tally.broken.append(f"{len(stuck)} legs do not end: {await self._states()}")
        self.clients.clear()
        self.others.clear()
        deadline = time.monotonic() + _CALM_SECONDS
        while held := [held_here for state in await self._states() if (held_here := _held_resources(state))]:
            if time.monotonic() > deadline:
                self.tally.broken.append(f"still held after {_CALM_SECONDS} s: {held}")
                return
            await asyncio.sleep(0.01)

    async def count_pulls_again(self) -> None:
        """Read the counters of the running decode worker."""
        self.pulls_again[self.decode.boot_id] = await self.decode.num_pulls_again()

    async def _states(self) -> list[dict[str, Any]]:
        return [await worker.checked_state() for worker in self.workers]


def _held_resources(state: dict[str, Any]) -> dict[str, Any]:
    blocks, connector = state["blocks"], state["connector"]
    checked_state = {
        "held": blocks["held"],
        "quarantined": blocks["quarantined"],
        "leases": state["leases"],
        "requests": state["requests"],
        "fetches": connector["fetches"],
        "lent": connector["leases"],
        "quarantine": any(connector["quarantine"].values()),
        "jobs": connector["data"]["queued_jobs"] or connector["data"]["current"],
    }
    return {name: what for name, what in checked_state.items() if what}


@asynccontextmanager
async def running_world(terrain: Terrain) -> AsyncIterator[World]:
    """Start both workers; the prefill worker can only be reached through the relays."""
    ports = [free_port(WORKER_HOST) for _ in range(2)]
    control = FramedPort(LINK_HOST, WORKER_HOST, ports[0])
    data = FaultyPort(LINK_HOST, WORKER_HOST, ports[1])
    linked = Place(WORKER_HOST, LINK_HOST, *ports)
    plain = Place("127.0.0.1", "127.0.0.1", 0, 0)
    prefill = Worker(Role.PREFILL, linked, terrain.transport, terrain.num_blocks[0])
    decode = Worker(Role.DECODE, plain, terrain.transport, terrain.num_blocks[1])
    try:
        for port in (control, data):
            await port.start()
        for worker in (prefill, decode):
            await worker.start()
        yield World(terrain, prefill, decode, control, data)
    finally:
        for worker in (prefill, decode):
            if worker.num_starts:
                await worker.shut_down()
        for port in (control, data):
            await port.stop()
