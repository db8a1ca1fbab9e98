"""Keeps the processes of one machine running: what ``kvbaton up`` is made of.

1. Every process starts when those that it needs are ready (workers need the router's address).
2. A process that ends before it was ever ready ends the supervisor with an error: starting it again would not help.
3. When all are ready, and after every later change, the ready file says where they are.
4. A process that ends later is started again, after a delay that doubles while it keeps failing.
5. ``stopped`` ends them: first what others need (the router takes no more requests), then the others.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from contract.errors import SettingError, UnavailableError
from launch.child import Child, Facts, ProcessSpec, describe_exit, start_child
from launch.ready_file import remove_ready_file, write_ready_file

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RestartPolicy:
    """The delays between an end and the next start: first, doubled, at most last; a life of calm_seconds resets it."""

    first_delay_seconds: float = 0.2
    last_delay_seconds: float = 30.0
    calm_seconds: float = 30.0
    grace_seconds: float = 10.0

    def delay(self, num_failures: int) -> float:
        """Seconds to wait after this many failures in a row (1 or more)."""
        return min(self.first_delay_seconds * 2.0 ** min(num_failures - 1, 30), self.last_delay_seconds)


class ProcessState(StrEnum):
    """What just happened to a process."""

    STARTED = "started"
    READY = "ready"
    ENDED = "ended"


Listener = Callable[[ProcessSpec, ProcessState, Facts], None]
"""Called after each change with the process's facts: its pid, and once ready its addresses."""


class Supervisor:
    """Owns the child processes of ``specs``. ``run`` is called once. Raises SettingError where two have one name."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        *,
        ready_file: Path | None = None,
        policy: RestartPolicy | None = None,
        listener: Listener | None = None,
    ) -> None:
        names = [spec.name for spec in specs]
        if len(set(names)) < len(names):
            raise SettingError(
                f"two processes share a name; each needs one of its own: {', '.join(sorted(names))}"
            )
        self.num_restarts: Counter[str] = Counter()
        self._specs = list(specs)
        self._ready_file = ready_file
        self._policy = policy or RestartPolicy()
        self._listener = listener
        self._children: dict[str, Child] = {}
        self._running: dict[str, Facts] = {}
        self._known: dict[str, Facts] = {}
        self._was_ready = {spec.name: asyncio.Event() for spec in specs}
        self._stopping = False

    @property
    def facts(self) -> dict[str, Facts]:
        """The facts of every process that was ever ready, by name."""
        return dict(self._known)

    async def wait_ready(self) -> dict[str, Facts]:
        """Block until every process has been ready once; their facts by name."""
        for event in self._was_ready.values():
            await event.wait()
        return self.facts

    async def run(self, stopped: asyncio.Event, at_once: asyncio.Event | None = None) -> None:
        """Start all and keep them running until ``stopped`` is set; no process is left when this returns or raises.

        at_once: set when the processes are not to finish their work first.

        Raises UnavailableError, which names the process, when one ends before it was ever ready.
        """
        remove_ready_file(self._ready_file)
        keepers = [asyncio.create_task(self._keep(spec), name=spec.name) for spec in self._specs]
        stop = asyncio.create_task(stopped.wait())
        try:
            done, _ = await asyncio.wait({stop, *keepers}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await self._stop_all([stop, *keepers], at_once)
        for keeper in done - {stop}:
            keeper.result()

    async def _keep(self, spec: ProcessSpec) -> None:
        for name in spec.needs:
            await self._was_ready[name].wait()
        num_failures = 0
        while True:
            began = time.monotonic()
            how = await self._live(spec)
            num_failures = 1 if time.monotonic() - began >= self._policy.calm_seconds else num_failures + 1
            delay = self._policy.delay(num_failures)
            self.num_restarts[spec.name] += 1
            logger.warning(
                "%s ended (%s); restart %d in %.1f s",
                spec.name,
                how,
                self.num_restarts[spec.name],
                delay,
            )
            await asyncio.sleep(delay)

    async def _live(self, spec: ProcessSpec) -> str:
        """One life of a process, from its start to its end; how it ended."""
        try:
            child = await start_child(spec, self._known)
        except OSError as error:
            if not self._was_ready[spec.name].is_set():
                raise UnavailableError(f"{spec.name} could not start: {error}") from error
            return f"it could not be started: {error}"
        self._children[spec.name] = child
        self._tell(spec, ProcessState.STARTED, {"pid": child.pid})
        try:
            facts = await child.wait_ready()
        except UnavailableError as error:
            self._tell(spec, ProcessState.ENDED, {"pid": child.pid})
            if not self._was_ready[spec.name].is_set():
                raise UnavailableError(f"{spec.name} could not start: {error.message}") from error
            return describe_exit(await child.wait())
        self._running[spec.name] = self._known[spec.name] = facts
        self._was_ready[spec.name].set()
        self._publish()
        self._tell(spec, ProcessState.READY, facts)
        code = await child.wait()
        del self._running[spec.name]
        self._publish()
        self._tell(spec, ProcessState.ENDED, facts)
        return describe_exit(code)

    def _publish(self) -> None:
        if self._stopping or not all(event.is_set() for event in self._was_ready.values()):
            return
        write_ready_file(self._ready_file, self._specs, self._running, self._known)

    def _tell(self, spec: ProcessSpec, state: ProcessState, facts: Facts) -> None:
        logger.info("%s %s (pid %s)", spec.name, state.value, facts["pid"])
        if self._listener and not self._stopping:
            self._listener(spec, state, facts)

    async def _stop_all(self, tasks: list[asyncio.Task[Any]], at_once: asyncio.Event | None) -> None:
        """End the keepers, so that nothing starts again, then the processes: workers when the router has drained."""
        self._stopping = True
        remove_ready_file(self._ready_file)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        needed = {name for spec in self._specs for name in spec.needs}
        drains = {spec.name: spec.drain_seconds for spec in self._specs}
        for group in (needed, self._children.keys() - needed):
            stops = [
                self._children[name].stop(self._policy.grace_seconds + drains[name], at_once)
                for name in group & self._children.keys()
            ]
            await asyncio.gather(*stops)
