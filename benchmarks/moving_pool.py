"""A prefill and two decode workers in processes, with a router in this one, for the measurement of moves."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from kv_transfer.options import TransportName
from router.attempts.leg_outcome import WorkerDrainedError
from router.attempts.request_run import RequestRun
from router.migration.migration import MigrationState
from router.migration.migrator import Migrator
from router.service import RouterService
from router.telemetry.metrics import RouterMetrics
from tests.chaos.fleet import Fleet
from tests.chaos.held_resources import read_states, until_free
from tests.chaos.local_router import running_workers

_LOOK_SECONDS = 0.001
_ANSWER_SECONDS = 120.0
DECODERS = ("decode-0", "decode-1")


@dataclass(frozen=True)
class Gap:
    """The longest time between two arrivals around a disturbance that began at ``began`` and was over at ``ended``."""

    began: float
    ended: float
    seconds: float


@dataclass
class Stream:
    """One streamed answer: its text, the times at which its pieces have arrived, and when it was disturbed."""

    request_id: str = ""
    text: str = ""
    arrivals: list[float] = field(default_factory=list)
    disturbed: list[tuple[float, float]] = field(default_factory=list)

    @property
    def step(self) -> float:
        """The usual gap: the median over all gaps, of which few are disturbed."""
        return median(self._gaps()) if len(self.arrivals) > 1 else 0.0

    @property
    def undisturbed_gaps(self) -> list[float]:
        """The gaps of a stream that was not disturbed, but for the first one: another worker computes the first token."""
        return self._gaps()[1:]

    @property
    def gaps(self) -> list[Gap]:
        """The gap of each disturbance."""
        return [Gap(began, ended, self._longest(began, ended)) for began, ended in self.disturbed]

    def _gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]

    def _longest(self, began: float, ended: float) -> float:
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return max(
            (later - earlier for earlier, later in pairs if later > began and earlier < ended), default=0.0
        )


Disturb = Callable[[RequestRun], Awaitable[bool]]
"""Disturbs an answer, and returns whether that has happened: it may have ended meanwhile."""


class MovingPool:
    """The router and its workers. Made by ``running_moving_pool``."""

    def __init__(self, router: RouterService, fleet: Fleet) -> None:
        self._router = router
        self._fleet = fleet
        self._path = router._path  # noqa: SLF001 the moves are ordered at chosen tokens
        self._moves = RouterMetrics().moves
        self._migrator = Migrator(self._path.registry, self._path.runs, self._moves)
        self._results: Counter[MigrationState] = Counter()

    def take_results(self) -> Counter[MigrationState]:
        """Return how many moves have had which result since the last call."""
        results = self._results
        self._results = Counter()
        return results

    def take_copies(self) -> list[float]:
        """Return for each move that has succeeded since the last call the seconds in which its bytes were copied."""
        copies = [record.copying_seconds for record in self._moves.recent]
        self._moves.recent.clear()
        return copies

    async def ask(
        self, body: dict[str, Any], disturb: Disturb | None = None, every: int = 1, count: int = 0
    ) -> Stream:
        """Stream one answer, and disturb it ``count`` times, each ``every`` tokens after the last time."""
        stream = Stream()
        async with asyncio.timeout(_ANSWER_SECONDS), asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(self._read({**body, "stream": True}, stream))
            if disturb:
                await self._disturb(stream, reading, disturb, every, count)
        return stream

    @asynccontextmanager
    async def others(self, bodies: Sequence[dict[str, Any]]) -> AsyncIterator[None]:
        """Have the workers decode other answers all the time, one for each of these bodies."""
        begun = [asyncio.Event() for _ in bodies]

        async def keep_asking(body: dict[str, Any], has_begun: asyncio.Event) -> None:
            while True:
                asking = asyncio.create_task(self._read({**body, "stream": True}, stream := Stream()))
                try:
                    while not (stream.arrivals or asking.done()):  # noqa: ASYNC110
                        await asyncio.sleep(_LOOK_SECONDS)
                    has_begun.set()
                    await asking
                finally:
                    asking.cancel()

        tasks = [asyncio.create_task(keep_asking(*each)) for each in zip(bodies, begun, strict=True)]
        try:
            await asyncio.gather(*(each.wait() for each in begun))
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def move(self, run: RequestRun) -> bool:
        """Move an answer to the other decode worker."""
        result = await self._migrator.move(run, self._worker_of(run))
        self._results[result] += 1
        return result is MigrationState.MOVED

    async def replay(self, run: RequestRun) -> bool:
        """Let an answer begin again as if its worker had given it up, and wait for its next token."""
        num_known = len(run.known_tokens)
        run.leave(self._worker_of(run), WorkerDrainedError("the benchmark compares with a replay"))
        while len(run.known_tokens) == num_known:  # noqa: ASYNC110 as a client sees it
            await asyncio.sleep(_LOOK_SECONDS)
        return True

    async def leaks(self) -> list[str]:
        """Wait until no worker holds anything, and return what one still holds."""
        admins = [(name, facts["admin"]) for name, facts in self._fleet.facts.items()]
        try:
            await until_free(lambda: read_states(admins), 60.0)
        except AssertionError as error:
            return [str(error)]
        return []

    def _runs_with(self, stream: Stream, num_tokens: int) -> list[RequestRun]:
        return [
            run
            for run in self._path.runs.open_runs
            if run.request.request_id == stream.request_id and len(run.known_tokens) >= num_tokens
        ]

    def _worker_of(self, run: RequestRun) -> Any:
        assert run.current.attempt is not None
        return run.current.attempt.legs.last.worker

    async def _disturb(
        self, stream: Stream, reading: "asyncio.Task[None]", disturb: Disturb, every: int, count: int
    ) -> None:
        for number in range(1, count + 1):
            while not (runs := self._runs_with(stream, every * number)) and not reading.done():  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_SECONDS)
            if not runs:
                return
            began = time.monotonic()
            if await disturb(runs[0]):
                stream.disturbed.append((began, time.monotonic()))

    async def _read(self, body: dict[str, Any], stream: Stream) -> None:
        url = f"http://{self._router.addresses.http}/v1/completions"
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    stream.request_id = event["id"]
                    if event["choices"]:
                        stream.arrivals.append(time.monotonic())
                        stream.text += event["choices"][0]["text"]


@asynccontextmanager
async def running_moving_pool(
    folder: Path, transport: TransportName, model: Path | None
) -> AsyncIterator[MovingPool]:
    """Run the router and the workers, without prefix caches; model: None for the demo model."""
    flags: dict[str, Any] = {"model": model} if model else {}
    names = ("prefill-0", *DECODERS)
    async with running_workers(
        folder, names, transport=transport, enable_prefix_caching=False, **flags
    ) as pool:
        yield MovingPool(*pool)
