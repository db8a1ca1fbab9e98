"""A played Docker engine whose containers are real worker processes, and ``kvbaton autoscaler`` as a process beside it."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from autoscaler.launchers.docker.launcher import worker_of
from autoscaler.timing_model import TimingModel, write_timing
from contract.identity import Role
from tests.autoscaler.played_engine import PROJECT, Facts, PlayedEngine, playing
from tests.autoscaler.scaled_up import NO_GOALS, until
from tests.chaos.fleet import ROUTER, Fleet, running_fleet
from tests.chaos.held_resources import read_metrics, read_states
from tests.chaos.settings import process_environment
from tests.scripted_checkpoint import make_scripted_checkpoint
from tests.service import counter


class ProcessEngine(PlayedEngine):
    """An engine that ends each call that it has begun, as Docker does, also if its client is gone.

    held: the verb of calls that wait before they have an effect: create, start or stop. ``reached`` is set when one waits;
    ``may_end`` lets it continue. is_away: no call is answered.
    """

    def __init__(self, fleet: Fleet, model: Path) -> None:
        super().__init__()
        self.held: str | None = None
        self.reached = asyncio.Event()
        self.may_end = asyncio.Event()
        self.is_away = False
        self._fleet = fleet
        self._model = model
        self._starts: set[asyncio.Task[None]] = set()

    async def answer(self, request: web.Request) -> web.Response:
        """Answer one call."""
        if self.is_away and request.transport is not None:
            request.transport.abort()
            await asyncio.Event().wait()  # until it is cancelled, because its client is gone
        return await asyncio.shield(self._answered(request))

    def running(self, role: Role) -> list[str]:
        """Return the names of the running containers of a role."""
        return [
            facts["Name"][1:]
            for facts in self.containers.values()
            if facts["State"]["Status"] == "running" and _role_of(facts) is role
        ]

    async def run_by_hand(self, role: Role, number: int) -> str:
        """Start a worker as ``docker compose up --scale`` does; return its id when it is ready."""
        facts = self.has(role.value, number)
        await self._run(facts)
        return _worker_of(facts)

    async def stop_by_hand(self, name: str) -> None:
        """Stop a container as an operator does."""
        facts = self.named(name)
        await self._fleet.terminate(_worker_of(facts))
        facts["State"]["Status"] = "exited"

    async def wait_started(self) -> None:
        """Wait until all workers that were started are ready. Raises the error of one that is not."""
        await asyncio.gather(*self._starts)

    async def _answered(self, request: web.Request) -> web.Response:
        verb = request.path.rpartition("/")[2]
        if verb == self.held and request.method == "POST":
            self.reached.set()
            await self.may_end.wait()
        return await super().answer(request)

    async def _about(self, method: str, verb: str, facts: Facts) -> web.Response:
        if (method, verb) == ("POST", "stop"):
            await self._fleet.terminate(_worker_of(facts))
        was_running = facts["State"]["Status"] == "running"
        reply = await super()._about(method, verb, facts)
        if (method, verb) == ("POST", "start") and reply.status < 400 and not was_running:
            task = asyncio.create_task(self._run(facts))
            self._starts.add(task)
        return reply

    async def _run(self, facts: Facts) -> None:
        name = _worker_of(facts)
        await self._fleet.start_worker(name, _role_of(facts), model=self._model, drain_seconds=20)


def _role_of(facts: Facts) -> Role:
    return Role(facts["Config"]["Labels"]["kvbaton.role"])


def _worker_of(facts: Facts) -> str:
    return worker_of(_role_of(facts), facts["Id"])


class Autoscaler:
    """``kvbaton autoscaler`` as a process. Its log is that of all processes before it, too."""

    def __init__(self, folder: Path, admin: str, timing: TimingModel) -> None:
        self.log = folder / "autoscaler.log"
        self.log.touch()
        self._process: asyncio.subprocess.Process | None = None
        write_timing(folder / "timing.json", timing)
        pace = ("--scaling-interval-seconds", "0.5", "--admin", "127.0.0.1:0", "--log-level", "debug")
        engine = ("--project", PROJECT, "--docker-socket", str(folder / "docker.sock"))
        service = ("--router-admin", admin, "--timing", str(folder / "timing.json"))
        self._flags = (*service, *engine, *pace, *NO_GOALS)

    async def start(self, *flags: str) -> None:
        """Start it, with these bounds."""
        command = (sys.executable, "-m", "cli.main", "autoscaler", *self._flags, *flags)
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command, stderr=log, env=process_environment()
            )

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int | None:
        """Send a signal and wait for its end; return the exit code."""
        if self._process is None or self._process.returncode is not None:
            return None
        self._process.send_signal(number)
        return await self._process.wait()

    def lines(self, part: str) -> list[str]:
        """Return the logged lines that contain a text."""
        return [line for line in self.log.read_text().splitlines() if part in line]

    async def until_line(self, part: str, number: int = 1) -> str:
        """Wait until ``number`` lines contain a text, and return the last one of these."""
        await until(
            lambda: len(self.lines(part)) >= number, lambda: f"no {part!r} in {self.log.read_text()[-4000:]}"
        )
        return self.lines(part)[number - 1]


class Project:
    """A Compose project with one container of each role and a router, which an autoscaler scales."""

    def __init__(self, fleet: Fleet, engine: ProcessEngine, autoscaler: Autoscaler) -> None:
        self.fleet = fleet
        self.engine = engine
        self.autoscaler = autoscaler

    @property
    def _admin(self) -> str:
        return str(self.fleet.facts[ROUTER]["admin"])

    @property
    def http(self) -> str:
        """The address for clients."""
        return str(self.fleet.facts[ROUTER]["http"])

    async def metric(self, name: str, **labels: str) -> float:
        """Return a sum of the router's metrics; 0 if there is none with these labels."""
        text = await read_metrics(self._admin)
        try:
            return counter([text], name, **labels)
        except AssertionError:
            return 0.0

    async def num_decisions(self, **labels: str) -> float:
        """Return the number of decisions that the router has received."""
        return await self.metric("kvbaton_scaling_decisions_total", pool="prefill", **labels)

    async def after_decisions(self, number: int, **labels: str) -> None:
        """Wait for so many more decisions."""
        before = await self.num_decisions(**labels)
        async with asyncio.timeout(120):
            while await self.num_decisions(**labels) < before + number:
                await asyncio.sleep(0.1)

    async def until_serving(self, number: int) -> None:
        """Wait until so many prefill workers serve and no other one is attached."""
        async with asyncio.timeout(120):
            while True:
                states = await read_states([(ROUTER, self._admin)])
                workers = [each for each in states[ROUTER]["workers"] if each["role"] == "prefill"]
                if len(workers) == number and all(
                    each["max_requests"] and not each["is_draining"] for each in workers
                ):
                    return
                await asyncio.sleep(0.1)


@asynccontextmanager
async def running_project(folder: Path, timing: TimingModel) -> AsyncIterator[Project]:
    """Run the router, a worker of each role, and the engine; the test starts the autoscaler."""
    model = make_scripted_checkpoint(folder / "model")
    async with running_fleet(folder) as fleet:
        engine = ProcessEngine(fleet, model)
        autoscaler = Autoscaler(folder, fleet.facts[ROUTER]["admin"], timing)
        await asyncio.gather(engine.run_by_hand(Role.PREFILL, 1), engine.run_by_hand(Role.DECODE, 1))
        async with playing(engine, folder):
            try:
                yield Project(fleet, engine, autoscaler)
            finally:
                await autoscaler.end()
                engine.may_end.set()
        await engine.wait_started()
    assert not autoscaler.lines("Traceback")
