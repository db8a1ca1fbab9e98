"""Keeps one process running: starts it when the processes that it needs are ready, and restarts it when it ends.

``ProcessSpec`` describes the process, ``Child`` is one run of it, and ``KeptProcess`` owns all runs.

A child gets ``--ready-fd N --parent-pid P --num-restarts K``. It writes one JSON line to N when it is ready (its addresses
and its pid) or cannot start ({"error": why}), asks the kernel to end it with P, and reports K to operators. It leads a
process group of its own, so that a Ctrl-C in the terminal reaches the supervisor alone, and nothing that the child
started outlives it.

It stays in the supervisor's session. Linux may divide the processors among sessions, however many threads of each wait
(autogroup in sched(7)). With a session for each child, threads that deliver tokens waited up to a second while those of
another session had both processors (docs/log.md, 2026-11-27).
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from contract.errors import SettingError, UnavailableError
from contract.identity import Role

logger = logging.getLogger(__name__)


Facts = dict[str, Any]
"""The facts that a child reports when it is ready: addresses ("http", "grpc", "internal", "admin" as "host:port"), "pid"."""
_MAX_READY_LINE_BYTES = 2**20


@dataclass(frozen=True)
class ProcessSpec:
    """A process to start.

    command: maps facts by process name to argv; the facts include every process that was ever ready, also an earlier run of
    this one, so that a restart can use the same ports. needs: names of the processes that must be ready first. env: the
    child's complete environment; None: the supervisor's own. drain_seconds: time to finish work after SIGTERM, in addition
    to the supervisor's grace.
    """

    name: str
    role: Role
    command: Callable[[Mapping[str, Facts]], list[str]]
    needs: tuple[str, ...] = ()
    env: Mapping[str, str] | None = None
    drain_seconds: float = 0.0


def check_specs(specs: Sequence[ProcessSpec]) -> None:
    """Raise SettingError if two specs have the same name, or if one needs a process that is not among them."""
    names = sorted(spec.name for spec in specs)
    if len(set(names)) < len(names):
        raise SettingError(f"two processes have the same name; each needs its own: {', '.join(names)}")
    for spec in specs:
        if missing := sorted(set(spec.needs) - set(names)):
            raise SettingError(
                f"{spec.name} needs {missing[0]}, which does not exist; the processes are {', '.join(names)}"
            )


class Child:
    """A running child process; made by ``start_child``."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        ready: asyncio.StreamReader,
        ready_pipe: asyncio.BaseTransport,
    ) -> None:
        self._process = process
        self._ready = ready
        self._ready_pipe = ready_pipe
        self._is_over = False

    @property
    def pid(self) -> int:
        """The process id, which is also the id of its process group."""
        return self._process.pid

    async def wait_ready(self) -> Facts:
        """Block until the process is ready. Raises UnavailableError if it ends before."""
        line = await self._ready.readline()
        if not line:
            code = await self.wait()
            raise UnavailableError(
                f"it ended before it was ready ({describe_exit(code)}); its own log messages give the reason"
            )
        facts: Facts = json.loads(line)
        if "error" in facts:
            await self.wait()
            raise UnavailableError(f"it ended before it was ready: {facts['error']}")
        return {**facts, "pid": self.pid}

    async def wait(self) -> int:
        """Block until the process and its group have ended; return the exit code (−N for signal N)."""
        code = await self._process.wait()
        if not self._is_over:  # later the id may belong to another group
            self._is_over = True
            self._kill_group()  # what the child started, as an engine's process, ends with it
            self._ready_pipe.close()
        return code

    async def stop(self, grace_seconds: float, at_once: asyncio.Event | None = None) -> int:
        """Send SIGTERM, and SIGKILL to the whole group after ``grace_seconds``; return the exit code.

        at_once: when it is set, a second SIGTERM makes the child abandon unfinished work.
        """
        self._terminate()
        hurry = asyncio.create_task(self._terminate_at(at_once)) if at_once else None
        try:
            return await asyncio.wait_for(self.wait(), grace_seconds)
        except TimeoutError:
            logger.warning("process %d did not stop within %g s and is killed", self.pid, grace_seconds)
            self._kill_group()
            return await self.wait()
        finally:
            if hurry:
                hurry.cancel()
                await asyncio.wait({hurry})

    async def _terminate_at(self, at_once: asyncio.Event) -> None:
        await at_once.wait()
        self._terminate()

    def _terminate(self) -> None:
        # Not asyncio's terminate(): it polls the process first, which takes the exit code of a child that has just ended
        # away from asyncio, so that 255 is reported.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


async def start_child(spec: ProcessSpec, known: Mapping[str, Facts], num_restarts: int = 0) -> Child:
    """Start the process of ``spec``, which was started again ``num_restarts`` times before.

    Raises OSError when its program cannot be started.
    """
    read_fd, write_fd = os.pipe()
    with contextlib.ExitStack() as opened:
        # Closed here in any case: the end of the line is seen only when the child alone has this end of the pipe.
        opened.callback(os.close, write_fd)
        reader = asyncio.StreamReader(limit=_MAX_READY_LINE_BYTES)
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_fd, "rb", buffering=0)
        )
        with contextlib.ExitStack() as kept:
            kept.callback(pipe.close)
            own = {"ready-fd": write_fd, "parent-pid": os.getpid(), "num-restarts": num_restarts}
            extra = [word for name, value in own.items() for word in (f"--{name}", str(value))]
            process = await asyncio.create_subprocess_exec(
                *spec.command(known),
                *extra,
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(write_fd,),
                process_group=0,
                env=spec.env,
            )
            kept.pop_all()
    return Child(process, reader, pipe)


def describe_exit(code: int) -> str:
    """Describe an exit code for people."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


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
        # A process that is still starting has no requests to drain, also after an earlier run that had some.
        drain_seconds = self.spec.drain_seconds if self.is_ready else 0.0
        await self._child.stop(self._policy.grace_seconds + drain_seconds, at_once)
        self._change(ProcessState.ENDED, facts)

    async def _keep(
        self,
        known: Callable[[], Mapping[str, Facts]],
        needed: Collection["KeptProcess"],
        predecessor: asyncio.Task[None] | None,
    ) -> None:
        # Two runs at once would need the same ports, and the same id at the router.
        if predecessor is not None:
            await asyncio.wait({predecessor})
        for process in needed:
            await process.was_ready.wait()
        num_failures = 0
        while True:
            began = time.monotonic()
            how = await self._live(known())
            # A process that ran well for a while and dies now is restarted soon, however often it failed before that.
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
