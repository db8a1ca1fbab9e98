"""Injects the same faults into whole workers with a model; every answer through a router equals the undisturbed one."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tests.chaos.fleet import LINK_HOST, WORKER_HOST, Fleet
from tests.chaos.proxy import FaultyPort
from tests.chaos.under_fault import LEASE, PEER_TIMEOUT, Scene, fixed_ports, running_scene
from tests.transfer_faults.faults import FAULTS, draw_faults, wait_a_moment
from tests.transfer_faults.framed import FramedPort

_PREFILL, _DECODE = "prefill-0", "decode-0"
_NUM_STREAMS = 4


@dataclass
class FleetWorker:
    """A worker of a fleet as a ``Victim``."""

    fleet: Fleet
    name: str
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def kill(self) -> None:
        """Kill it with SIGKILL, and wait until it is gone."""
        await self.fleet.kill(self.name)

    async def start(self) -> None:
        """Start it again, on the same ports."""
        await self.fleet.restart(self.name)

    def stop(self) -> None:
        """Send SIGSTOP."""
        self.fleet.freeze(self.name)

    def go_on(self) -> None:
        """Send SIGCONT."""
        self.fleet.thaw(self.name)


@dataclass
class WholeStage:
    """One prefill and one decode worker on the two ends of a faulty link. A ``Stage``."""

    scene: Scene
    control: FramedPort
    data: FaultyPort
    workers: Sequence[FleetWorker]
    peer_timeout_seconds: float = PEER_TIMEOUT
    lease_seconds: float = LEASE
    has_data_stream: bool = True

    @property
    def ports(self) -> Sequence[FaultyPort]:
        """The relays."""
        return self.control, self.data


@dataclass
class WholeReport:
    """The results of several runs. wrong, failed: empty if every promise was kept."""

    num_runs: int = 0
    num_whole: int = 0
    num_replays: float = 0
    num_flips: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    tricks: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        data: dict[str, Any] = msgspec.to_builtins(self)
        return data


async def run_whole_workers(folder: Path, rng: random.Random, *, num_runs: int) -> WholeReport:
    """Run several times: clients send requests, one to three faults happen, everything must be free again."""
    report = WholeReport()
    async with _stage(folder, rng) as stage:
        for number in range(num_runs):
            drawn = draw_faults(rng, FAULTS, has_data_stream=True)
            report.faults.update(drawn)
            outcome = await stage.scene.during(lambda names=drawn: _suffer(stage, rng, names), _NUM_STREAMS)  # type: ignore[misc]
            stage.control.tricks.clear()
            stage.data.flip_after_bytes = None
            where = f" (run {number}, faults {drawn})"
            report.wrong += [what + where for what in outcome.wrong]
            report.failed += [what + where for what in outcome.errors]
            report.num_whole += outcome.num_whole
            report.num_replays += outcome.num_replays
            await stage.scene.until_calm(2)
            report.num_runs += 1
        report.tricks, report.num_flips = stage.control.played, stage.data.num_flips
    return report


async def _suffer(stage: WholeStage, rng: random.Random, names: Sequence[str]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for name in names:
            tasks.create_task(_suffer_one(stage, random.Random(rng.random()), name))


async def _suffer_one(stage: WholeStage, rng: random.Random, name: str) -> None:
    await wait_a_moment(stage, rng)
    await FAULTS[name][0](stage, rng)


@asynccontextmanager
async def _stage(folder: Path, rng: random.Random) -> AsyncIterator[WholeStage]:
    flags = fixed_ports(WORKER_HOST)
    grpc, data = (FaultyPort(LINK_HOST, WORKER_HOST, flags[name]) for name in ("port", "data_port"))
    control = FramedPort(LINK_HOST, WORKER_HOST, flags["control_port"])
    linked = {"transport": "tcp", "host": WORKER_HOST, "advertise_host": LINK_HOST, **flags}
    workers: dict[str, dict[str, Any]] = {
        _PREFILL: linked,
        _DECODE: {"transport": "tcp", **fixed_ports("127.0.0.1")},
    }
    async with AsyncExitStack() as undo:
        for port in (grpc, control, data):
            undo.push_async_callback(port.stop)
            await port.start()
        scene = await undo.enter_async_context(running_scene(folder, rng, workers))
        yield WholeStage(scene, control, data, [FleetWorker(scene.fleet, name) for name in workers])
