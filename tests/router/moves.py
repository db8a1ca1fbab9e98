"""A cluster with an answer that is to be moved, for the tests of moves."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from contract.identity import Role
from protos import worker_pb2 as pb
from router.attempts.request_run import RequestRun
from router.migration.migration import MigrationState
from router.migration.migrator import Migrator
from router.telemetry.metrics import RouterMetrics
from router.workers.attached_worker import AttachedWorker
from tests.fakes.router.script import Script
from tests.fakes.router.worker import ScriptedWorker
from tests.router.cluster import PAIR, Cluster, running_cluster
from tests.router.test_ends import nothing_is_left
from tests.router.test_replay import texts
from tests.text.tiny_model import END, byte_ids

ANSWER = "abcdefghijklmnop"
TOKENS = [*byte_ids(ANSWER.encode()), END]
STALL = 6
SOURCE, TARGET = "decode-0", "target"
NO_CREDIT = pb.Credit()


def stalling(first: int = STALL, **trouble: Any) -> Callable[[pb.Task], Script]:
    """Return a script that waits for ever before token ``first`` in the first attempt, with other troubles there."""
    return lambda task: Script(tokens=TOKENS, **({} if task.attempt else {"stall_at": first, **trouble}))


def only_on(worker: ScriptedWorker, **trouble: Any) -> None:
    """Give a worker a script of its own: its answers have these troubles in every attempt."""
    worker.player.script = lambda _: Script(tokens=TOKENS, **trouble)


class Moves:
    """A cluster with one answer that stalls on SOURCE, and a migrator of its router."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.path = cluster.service._path
        self.metrics = RouterMetrics()
        self.migrator = Migrator(self.path.registry, self.path.runs, self.metrics.moves)
        self.asking: list[asyncio.Task[list[str]]] = []
        self.fields: dict[str, Any] = {}
        """Further fields of the requests."""

    @property
    def source(self) -> ScriptedWorker:
        return self.cluster.workers[SOURCE]

    @property
    def target(self) -> ScriptedWorker:
        return self.cluster.workers[TARGET]

    def attached(self, name: str = SOURCE) -> AttachedWorker:
        return self.path.registry.get(name)

    @property
    def runs(self) -> list[RequestRun]:
        return list(self.path.runs.open_runs)

    async def ask(self, num_known: int = STALL) -> None:
        """Begin an answer on SOURCE, and wait until all of its tokens before the stall have arrived."""
        self.asking.append(asyncio.create_task(texts(self.cluster, **self.fields)))
        async with asyncio.timeout(20):
            while sum(len(run.known_tokens) == num_known for run in self.runs) < len(self.asking):
                await asyncio.sleep(0.005)

    async def move(self) -> MigrationState:
        (run,) = self.runs
        async with asyncio.timeout(20):
            return await self.migrator.move(run, self.attached())

    async def ends(self) -> None:
        """Wait for all answers, which are whole, and for the release of all credit."""
        async with asyncio.timeout(20):
            for asking in self.asking:
                assert "".join(await asking) == ANSWER
        await nothing_is_left(self.cluster)

    def count(self, result: str) -> float:
        labels = {"result": result, "reason": "flip"}
        return self.metrics._registry.get_sample_value("kvbaton_migrations_total", labels) or 0.0


@asynccontextmanager
async def moves(
    script: Callable[[pb.Task], Script] | None = None,
    *,
    target: Role | None = Role.DECODE,
    fields: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Moves]:
    """Run an answer up to its stall, then attach the target."""
    async with running_cluster(script or stalling(), PAIR, **{"max_replays": 0, **settings}) as cluster:
        made = Moves(cluster)
        made.fields = fields or {}
        await made.ask()
        if target:
            await cluster.add(target, TARGET)
        yield made
