"""A pool of routers and workers whose processes are killed, frozen, stopped and added singly."""

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from contract.identity import Role
from tests.chaos.clients import MODEL
from tests.chaos.fleet import LINK_HOST, ROUTER, WORKER_HOST, Fleet, free_port, role_of, running_fleet
from tests.chaos.held_resources import State, read_metrics, read_states
from tests.chaos.pool.balancer import Balancer, running_balancer
from tests.chaos.pool.descriptors import Kinds, own_descriptors, processes_of
from tests.chaos.pool.faults import Faults
from tests.chaos.pool.moves import MoveLog
from tests.chaos.proxy import FaultyLink, faulty_link
from tests.chaos.under_fault import fixed_ports

PEER_TIMEOUT = 2.0
LINKED = "prefill-0"
"""The worker whose links to other workers can be cut."""
_TESTS = "tests"
_RETURN_SECONDS = 120.0
_DRAIN_SECONDS = (1.0, 30.0)
"""With the first one, legs are left at the deadline; with the second one, they end before."""
_TIMES = {"peer_timeout_seconds": PEER_TIMEOUT, "lease_seconds": 5.0}


@dataclass
class Pool:
    """Owns which workers are disturbed at the moment. Made by ``running_pool``.

    routers: their names. link: carries what other workers send to ``LINKED``. deaths: times at which routers were killed.
    last_metrics: /metrics of killed routers, read shortly before. faults: of workers and their links. move_log: the moves.
    """

    fleet: Fleet
    routers: list[str]
    link: FaultyLink
    balancer: Balancer
    disturbed: set[str] = field(default_factory=set)
    deaths: dict[str, list[float]] = field(default_factory=dict)
    last_metrics: list[str] = field(default_factory=list)
    faults: Faults = field(default_factory=Faults)
    move_log: MoveLog = field(default_factory=MoveLog)

    async def start_worker(self, name: str, **flags: Any) -> None:
        """Start a worker, whose name begins with its role, and wait until every router counts on it."""
        await self.fleet.start_worker(name, role_of(name), routers=self.routers, **_TIMES, **flags)

    def take(self, rng: random.Random, *, only: str | None = None, role: Role | None = None) -> str | None:
        """Return an undisturbed worker, disturbed from now on, if another one of its role stays; else None."""
        free = [name for name in self.workers if name not in self.disturbed]
        roles = [role_of(name) for name in free]
        spare = [name for name in free if roles.count(role_of(name)) > 1 and only in (None, name)]
        spare = [name for name in spare if role in (None, role_of(name))]
        if not spare:
            return None
        victim = rng.choice(spare)
        self.disturbed.add(victim)
        return victim

    @property
    def workers(self) -> list[str]:
        """The names of the workers, stopped ones that return included."""
        return [name for name in self.fleet.children if name not in self.routers]

    def forget(self, name: str) -> None:
        """Remove a worker that has ended for good."""
        for known in (self.fleet.children, self.fleet.facts, self.fleet.flags):
            known.pop(name, None)
        self.disturbed.discard(name)

    async def until_back(self, *names: str) -> None:
        """Wait until every running router counts on these workers; they are undisturbed from then on."""
        async with asyncio.timeout(_RETURN_SECONDS):
            while not all(set(names) <= ready for ready in await self.ready_workers()):
                await asyncio.sleep(0.1)
        self.disturbed.difference_update(names)

    async def stop(self, name: str) -> float:
        """Stop a worker by SIGTERM; return the seconds until it has left. Raises AssertionError if it fails."""
        began = time.monotonic()
        code = await self.fleet.terminate(name)
        assert code == 0, f"{name} has ended with exit code {code}"
        return time.monotonic() - began

    async def start_again(self, name: str) -> None:
        """Start a worker that has ended again, and wait until it is back."""
        await self.fleet.restart(name)
        await self.until_back(name)

    async def until_known_to(self, router: str) -> None:
        """Wait until a router that was started again counts on every undisturbed worker."""
        async with asyncio.timeout(_RETURN_SECONDS):
            while not set(self.workers) - self.disturbed <= await self._ready_at(router):
                await asyncio.sleep(0.1)

    async def ready_workers(self) -> list[set[str]]:
        """Return the workers that each running router counts on."""
        found = []
        for router in [name for name in self.routers if name not in self.disturbed]:
            with self._may_be_killed(router):
                found.append(await self._ready_at(router))
        return found

    async def _ready_at(self, router: str) -> set[str]:
        state = (await read_states([(router, self.fleet.facts[router]["admin"])]))[router]
        return {worker["worker_id"] for worker in state["workers"] if worker["max_requests"]}

    async def keep_reading_moves(self) -> None:
        """Read the moves of all routers again and again, until the task is cancelled."""
        await self.move_log.keep_reading(
            {router: self.fleet.facts[router]["admin"] for router in self.routers}
        )

    async def read_before_kill(self, router: str) -> None:
        """Read what a router that is about to be killed has counted."""
        admin = self.fleet.facts[router]["admin"]
        self.last_metrics.append(await read_metrics(admin))
        await self.move_log.read(router, admin)

    async def states(self) -> dict[str, State]:
        """Return /debug/state of every process, by name."""
        return await self.fleet.states()

    def descriptors(self) -> dict[str, Kinds]:
        """Return what each process, its children included, has open besides its connections to the others."""
        pids = {name: processes_of(child.pid) for name, child in self.fleet.children.items()}
        own = own_descriptors({_TESTS: [os.getpid()], **pids})
        del own[_TESTS]
        return own

    async def facts(self) -> dict[str, Any]:
        """Return the workers as the admin API of a running router lists them."""
        url = f"http://{self.fleet.facts[self._some_router()]['admin']}/admin/workers"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            found: dict[str, Any] = await response.json()
        return found

    async def order(self, worker: str, path: str) -> tuple[int, dict[str, Any]]:
        """POST to the admin API of a running router about a worker, and to another one if it is killed meanwhile.

        Returns status and body.
        """
        while True:
            router = self._some_router()
            url = f"http://{self.fleet.facts[router]['admin']}/admin/workers/{worker}/{path}"
            with self._may_be_killed(router):
                async with aiohttp.ClientSession() as session, session.post(url) as response:
                    return response.status, await response.json()

    @contextmanager
    def _may_be_killed(self, router: str) -> Iterator[None]:
        """Suppress the end of a connection to a router that was killed meanwhile."""
        try:
            yield
        except (aiohttp.ClientError, ConnectionError):
            if router not in self.disturbed:
                raise

    def _some_router(self) -> str:
        """Return the name of a running router."""
        return next(name for name in self.routers if name not in self.disturbed)


@asynccontextmanager
async def running_pool(
    folder: Path, num_routers: int, num_prefill: int, num_decode: int
) -> AsyncIterator[Pool]:
    """Run the routers, the balancer and the workers; all processes are stopped at the end."""
    flags = {"peer_timeout_seconds": PEER_TIMEOUT, "served_model_name": MODEL}
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(running_fleet(folder, **flags))
        routers = [ROUTER, *(f"router-{number}" for number in range(1, num_routers))]
        for name in routers[1:]:
            ports = {
                port: f"127.0.0.1:{free_port('127.0.0.1')}" for port in ("http", "grpc", "internal", "admin")
            }
            await fleet.start(name, Role.ROUTER, secret_file=fleet.secret_file, **ports, **flags)
        backends = {
            protocol: {name: fleet.facts[name][protocol] for name in routers} for protocol in ("http", "grpc")
        }
        balancer = await stack.enter_async_context(running_balancer(backends))
        ports_of_linked = fixed_ports(WORKER_HOST)
        link = await stack.enter_async_context(
            faulty_link(
                LINK_HOST,
                WORKER_HOST,
                *(ports_of_linked[port] for port in ("port", "control_port", "data_port")),
            )
        )
        pool = Pool(fleet, routers, link, balancer)
        names = [f"prefill-{number}" for number in range(num_prefill)]
        names += [f"decode-{number}" for number in range(num_decode)]
        linked = {"host": WORKER_HOST, "advertise_host": LINK_HOST, "transport": "tcp", **ports_of_linked}
        async with asyncio.TaskGroup() as tasks:
            for number, name in enumerate(names):
                own = linked if name == LINKED else {}
                drain_seconds = _DRAIN_SECONDS[number % 2]
                tasks.create_task(pool.start_worker(name, drain_seconds=drain_seconds, **own))
        await pool.until_back(*names)
        yield pool
