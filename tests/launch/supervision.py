"""A running supervisor for tests, and a listener that a test can wait on."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from launch.kept_process import Facts, ProcessSpec, ProcessState, RestartPolicy
from launch.supervisor import Supervisor

QUICK = RestartPolicy(first_delay_seconds=0.01, grace_seconds=20.0)


class Watcher:
    """A listener that a test can wait on."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[tuple[str, ProcessState, Facts]] = asyncio.Queue()

    def __call__(self, spec: ProcessSpec, state: ProcessState, facts: Facts) -> None:
        self.events.put_nowait((spec.name, state, facts))

    async def wait_for(self, name: str, state: ProcessState) -> Facts:
        while True:
            found, found_state, facts = await self.events.get()
            if (found, found_state) == (name, state):
                return facts


@asynccontextmanager
async def running(
    specs: Sequence[ProcessSpec], ready_file: Path | None = None, policy: RestartPolicy = QUICK
) -> AsyncIterator[tuple[Supervisor, Watcher]]:
    """Run a supervisor whose processes are all ready, and stop it cleanly afterwards."""
    watcher, stopped = Watcher(), asyncio.Event()
    supervisor = Supervisor(specs, ready_file=ready_file, policy=policy, listener=watcher)
    run = asyncio.create_task(supervisor.run(stopped))
    try:
        await supervisor.wait_ready()
        yield supervisor, watcher
    finally:
        stopped.set()
        await run


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content
