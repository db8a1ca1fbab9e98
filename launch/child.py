"""Starts a child process on this machine, waits until it is ready, and stops it.

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
from collections.abc import Mapping

from contract.errors import UnavailableError
from launch.spec import Facts, ProcessSpec

logger = logging.getLogger(__name__)

_MAX_READY_LINE_BYTES = 2**20


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
            self._kill_group()
            self._ready_pipe.close()
        return code

    async def stop(self, grace_seconds: float, at_once: asyncio.Event | None = None) -> int:
        """Send SIGTERM, and SIGKILL to the whole group after ``grace_seconds``; return the exit code.

        at_once: when it is set, a second SIGTERM makes the child abandon unfinished work.
        """
        self._terminate()
        hurry = asyncio.create_task(self._hurry(at_once)) if at_once else None
        try:
            return await self._stopped(grace_seconds)
        finally:
            if hurry:
                hurry.cancel()
                await asyncio.wait({hurry})

    async def _hurry(self, at_once: asyncio.Event) -> None:
        await at_once.wait()
        self._terminate()

    def _terminate(self) -> None:
        # Not asyncio's terminate(): it polls the process first, which takes the exit code of a child that has just ended
        # away from asyncio, so that 255 is reported.
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    async def _stopped(self, grace_seconds: float) -> int:
        try:
            return await asyncio.wait_for(self.wait(), grace_seconds)
        except TimeoutError:
            logger.warning("process %d did not stop within %g s and is killed", self.pid, grace_seconds)
            self._kill_group()
            return await self.wait()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


async def start_child(spec: ProcessSpec, known: Mapping[str, Facts], num_restarts: int = 0) -> Child:
    """Start the process of ``spec``, which was started again ``num_restarts`` times before.

    Raises OSError when its program cannot be started.
    """
    read_fd, write_fd = os.pipe()
    with contextlib.ExitStack() as opened:
        opened.callback(os.close, write_fd)
        reader, pipe = await _read_lines(read_fd)
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


async def _read_lines(read_fd: int) -> tuple[asyncio.StreamReader, asyncio.BaseTransport]:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_MAX_READY_LINE_BYTES)
    pipe = os.fdopen(read_fd, "rb", buffering=0)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader, transport


def describe_exit(code: int) -> str:
    """Describe an exit code for people."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
