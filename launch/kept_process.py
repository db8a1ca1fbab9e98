"""Keeps one process running: starts it when the processes that it needs are ready, and restarts it when it ends."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from contract.errors import UnavailableError
from launch.child import Child, describe_exit, start_child
from launch.spec import Facts, ProcessSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RestartPolicy:
    """The delays before a restart: the first, doubled each time, up to the last; a run of calm_seconds resets them."""

    first_delay_seconds: float = 0.2
    last_delay_seconds: float = 30.0
    calm_seconds: float = 30.0
    grace_seconds: float = 10.0

    def delay(self, num_failures: int) -> float:
        """Return the seconds to wait after this many failures in a row (1 or more)."""
        return min(self.first_delay_seconds * 2.0 ** min(num_failures - 1, 30), self.last_delay_seconds)


class ProcessState(StrEnum):
    """The most recent change of a process."""

    STARTED = "started"
    READY = "ready"
    ENDED = "ended"


Listener = Callable[[ProcessSpec, ProcessState, Facts], None]
"""Called after each change with the process's facts: its pid, and once ready its addresses."""


class KeptProcess:
    """Owns the child process of one spec through all restarts. ``start`` and ``stop`` are called at most once each.

    must_start: an end before the process was ever ready is an error of the task; otherwise the start is retried.
    on_change: called after the attributes below have changed.
    """

    def __init__(
        self, spec: ProcessSpec, policy: RestartPolicy, *, must_start: bool, on_change: Listener
    ) -> None:
        self.spec = spec
        self.facts: Facts | None = None
        """The facts that the process reported when it was last ready; kept after its end."""
        self.is_ready = False
        self.num_restarts = 0
        self.was_ready = asyncio.Event()
        """Set when the process is ready for the first time; its owner may set it to unblock waiting processes."""
        self._policy = policy
        self._must_start = must_start
        self._on_change = on_change
        self._child: Child | None = None
        self._keeper: asyncio.Task[None] | None = None

    def start(
        self,
        known: Callable[[], Mapping[str, Facts]],
        needed: Collection["KeptProcess"],
        predecessor: asyncio.Task[None] | None = None,
    ) -> asyncio.Task[None]:
        """Keep the process running from now on; the task ends with an error only.

        known: returns the facts for the command. needed: processes that must be ready first. predecessor: a task that ends
        with an earlier process of the same name; the start waits for it.

        The task raises UnavailableError, which names the process, if the process must start and does not.
        """
        self._keeper = asyncio.create_task(self._keep(known, needed, predecessor), name=self.spec.name)
        return self._keeper

    def release(self) -> None:
        """Do not restart the process; a running one continues until ``stop``."""
        if self._keeper is not None:
            self._keeper.cancel()

    async def stop(self, at_once: asyncio.Event | None) -> None:
        """Stop the process after ``release``: SIGTERM, and SIGKILL after its drain time and the policy's grace.

        at_once: when it is set, the process abandons its work. One that is not ready has none, and no drain time.
        """
        if self._keeper is not None:
            await asyncio.wait({self._keeper})
        if self._child is None:
            return
        facts = self.facts if self.is_ready and self.facts else {"pid": self._child.pid}
        drain_seconds = self.spec.drain_seconds if self.is_ready else 0.0
        await self._child.stop(self._policy.grace_seconds + drain_seconds, at_once)
        self._change(ProcessState.ENDED, facts)

    async def _keep(
        self,
        known: Callable[[], Mapping[str, Facts]],
        needed: Collection["KeptProcess"],
        predecessor: asyncio.Task[None] | None,
    ) -> None:
        if predecessor is not None:
            await asyncio.wait({predecessor})
        for process in needed:
            await process.was_ready.wait()
        num_failures = 0
        while True:
            began = time.monotonic()
            how = await self._live(known())
            num_failures = 1 if time.monotonic() - began >= self._policy.calm_seconds else num_failures + 1
            delay = self._policy.delay(num_failures)
            self.num_restarts += 1
            logger.warning(
                "%s ended (%s); restart %d in %.1f s", self.spec.name, how, self.num_restarts, delay
            )
            await asyncio.sleep(delay)

    async def _live(self, known: Mapping[str, Facts]) -> str:
        """Start the process and wait for its end; return how it ended."""
        try:
            self._child = child = await start_child(self.spec, known, self.num_restarts)
        except OSError as error:
            self._check_start(str(error), error)
            return f"it could not be started: {error}"
        self._change(ProcessState.STARTED, {"pid": child.pid})
        try:
            facts = await child.wait_ready()
        except UnavailableError as error:
            self._change(ProcessState.ENDED, {"pid": child.pid})
            self._check_start(error.message, error)
            return describe_exit(await child.wait())
        self.facts = facts
        self.was_ready.set()
        self._change(ProcessState.READY, facts)
        code = await child.wait()
        self._change(ProcessState.ENDED, facts)
        return describe_exit(code)

    def _check_start(self, why: str, error: Exception) -> None:
        """Raise UnavailableError if this was the first start and it must succeed."""
        if self._must_start and not self.was_ready.is_set():
            raise UnavailableError(f"{self.spec.name} could not start: {why}") from error

    def _change(self, state: ProcessState, facts: Facts) -> None:
        self.is_ready = state is ProcessState.READY
        if state is ProcessState.ENDED:
            self._child = None
        self._on_change(self.spec, state, facts)
