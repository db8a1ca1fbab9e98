"""Reads that are posted to the NIXL library step by step, and the driver that carries them on.

A posted read cannot be cancelled, and its bytes may land as long as it is not terminal: nothing of it is released before.
Ending the agent makes every read terminal.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty
from typing import Any

import numpy as np
import numpy.typing as npt

from contract.errors import KvbatonError, TransferError
from engine.mailbox import Mailbox
from kv_transfer.protocol.reads import BlockPart
from kv_transfer.transports.nixl.agent import NixlAgent, NixlLibrary, Region
from kv_transfer.transports.nixl.remote_pool import DescribedRegion, RemotePool

logger = logging.getLogger(__name__)
_SPIN_SECONDS = 50e-6
_MIN_PAUSE_SECONDS = 0.2e-3
_MAX_PAUSE_SECONDS = 20e-3
_IDLE_PER_PAUSE = 250
"""A pause is this small a part of the time for which nothing has happened."""
LATE_SECONDS = 0.02
"""A read that is open for longer may need its sender's help, which is requested then and for later reads."""
Ids = npt.NDArray[np.int32]


@dataclass
class ReadStep:
    """A read of blocks of one region into blocks of another one of the same size, whole or a part of each."""

    into: DescribedRegion
    into_ids: Ids
    out_of: DescribedRegion
    out_of_ids: Ids
    part: BlockPart | None = None

    def prepare(self, agent: NixlAgent) -> Any:
        """Return the handle to post, which the caller releases. Raises KvbatonError."""
        return agent.prepare(
            self.into.blocks(self.part), self.into_ids, self.out_of.blocks(self.part), self.out_of_ids
        )


@dataclass
class SlotsStep:
    """A read of slots of a peer's table of generations into ``pool.found``."""

    pool: RemotePool
    slots: tuple[int, ...]

    def prepare(self, agent: NixlAgent) -> Any:
        """Return the handle to post, which the pool keeps. Raises KvbatonError."""
        return self.pool.look_at(agent, self.slots)


class NixlRead:
    """One read in steps; a step is posted when the one before is terminal.

    The driver carries it on, and one thread waits for it. is_late: it was open for LATE_SECONDS. posted: the handle of the
    open step. handles: those to release when the read is terminal.
    """

    def __init__(self, pool: RemotePool, steps: Sequence[ReadStep | SlotsStep]) -> None:
        self.pool = pool
        self._steps = iter(steps)
        self.posted: Any = None
        self.handles: list[Any] = []
        self.is_terminal = False
        self.is_late = False
        self._opened_at = time.monotonic()
        self._error: KvbatonError | None = None
        self._changes: Mailbox[None] = Mailbox()

    def post_next(self, agent: NixlAgent) -> bool:
        """Post further steps as long as each is done at once; return False if all are. Raises KvbatonError."""
        for step in self._steps:
            self.posted = step.prepare(agent)
            if isinstance(step, ReadStep):
                self.handles.append(self.posted)
            if not agent.post(self.posted):
                return True
        return False

    def wake(self) -> None:
        """Make the waiting thread check again. Does not block."""
        self._changes.put(None)

    def end(self, error: KvbatonError | None) -> None:
        """Mark the read as terminal, with its error if any."""
        self._error = error
        self.is_terminal = True
        self.wake()

    def check_late(self) -> None:
        """Mark an open read as late, once."""
        if not self.is_late and time.monotonic() - self._opened_at >= LATE_SECONDS:
            self.is_late = True
            self.wake()

    def wait(self, timeout_seconds: float) -> bool:
        """Wait for a change of the read; return False if there was none for so long."""
        with suppress(Empty):
            self._changes.get(timeout_seconds)
            return True
        return False

    def check(self) -> None:
        """Raise the error of a terminal read, if any."""
        if self._error is not None:
            raise self._error


class AgentDriver:
    """Owns the agent and everything that is posted to it. Called by one thread at a time."""

    def __init__(self) -> None:
        self.pool_blocks: DescribedRegion | None = None
        self._agent: NixlAgent | None = None
        self._posted: list[NixlRead] = []
        self._pools: set[RemotePool] = set()
        self._num_serving = 0
        self._serves_until = 0.0
        self._active_at = 0.0

    def start(self, library: NixlLibrary, name: str) -> None:
        """Start the agent. Raises SettingError."""
        self._agent = NixlAgent(library, name)

    def register(self, pool: Region, table: Region) -> bytes:
        """Register both; return the agent's metadata for peers."""
        agent = self._alive()
        agent.register(pool)
        agent.register(table)
        if not pool.is_device:
            self.pool_blocks = DescribedRegion(agent, pool)
        return agent.metadata()

    def connect(self, pool: RemotePool, metadata: bytes) -> None:
        """Make a peer's pool readable."""
        pool.enter(self._alive(), metadata)
        self._pools.add(pool)

    def disconnect(self, pool: RemotePool) -> None:
        """Remove a peer's pool, as soon as no read of it is posted."""
        self._pools.discard(pool)
        _logging_failure(pool.leave)

    def serve(self, change: int) -> None:
        """Change the number of peers that read from here."""
        self._num_serving += change

    def serve_until(self, due: float) -> None:
        """Serve until this time (monotonic seconds) in any case."""
        self._serves_until = max(self._serves_until, due)

    @property
    def is_active(self) -> bool:
        """A read is posted, or a peer may read from here."""
        return bool(self._posted) or self._is_serving

    def pause_seconds(self) -> float | None:
        """Return how long to wait before the next ``drive``; None: until there is a command.

        There is no pause for 50 us after an activity, then one of 0.2 ms, which grows with the time without activity (a peer
        that is stopped may be so for hours).
        """
        if not self.is_active:
            return None
        idle = time.monotonic() - self._active_at
        pause = min(max(idle / _IDLE_PER_PAUSE, _MIN_PAUSE_SECONDS), _MAX_PAUSE_SECONDS)
        return pause if idle >= _SPIN_SECONDS else 0.0

    def mark_active(self) -> None:
        """Restart with short pauses."""
        self._active_at = time.monotonic()

    def begin(self, read: NixlRead) -> None:
        """Post the first step of a read."""
        self._posted.append(read)
        read.pool.num_posted += 1
        self._advance(read)

    def drive(self) -> None:
        """Let posted reads and those of peers progress."""
        for read in list(self._posted):
            try:
                is_done = self._alive().is_done(read.posted)
            except KvbatonError as error:
                self._finish(read, error)
                continue
            if is_done:
                self._advance(read)
            else:
                read.check_late()
        if self._is_serving:
            _logging_failure(self._alive().progress)

    def close(self) -> None:
        """End the agent; every read fails. Later calls raise TransferError."""
        posted = self._posted
        agent = self._agent
        self._agent = None
        self._posted = []
        self.pool_blocks = None
        if agent is not None:
            for read in posted:
                _release_handles(agent, read)
            for pool in self._pools | {read.pool for read in posted}:
                _logging_failure(pool.abandon)
            agent.close()
        for read in posted:
            read.end(TransferError("the NIXL agent was closed"))

    @property
    def _is_serving(self) -> bool:
        return self._num_serving > 0 or time.monotonic() < self._serves_until

    def _alive(self) -> NixlAgent:
        if self._agent is None:
            raise TransferError("the NIXL agent is closed")
        return self._agent

    def _advance(self, read: NixlRead) -> None:
        """Post the next step of a read none of whose steps is open, or finish the read."""
        try:
            is_open = read.post_next(self._alive())
        except KvbatonError as error:
            self._finish(read, error)
            return
        if not is_open:
            self._finish(read, None)

    def _finish(self, read: NixlRead, error: KvbatonError | None) -> None:
        self.mark_active()
        self._posted.remove(read)
        read.pool.num_posted -= 1
        read.end(None if error is None else type(error)(f"{read.pool.who}: {error.message}"))
        _release_handles(self._alive(), read)
        _logging_failure(read.pool.release_if_unused)


def _release_handles(agent: NixlAgent, read: NixlRead) -> None:
    for handle in read.handles:
        _logging_failure(partial(agent.release, handle))


def _logging_failure(work: Callable[[], None]) -> None:
    """Do what no thread waits for; log a failure."""
    try:
        work()
    except KvbatonError as error:
        logger.warning("%s", error.message)
