"""The thread that owns this process's NIXL agent, and lends it to other threads while it rests.

The agent is started so that the library serializes its calls (STRICT, which is SERIALIZED in UCX), and they come from one
thread at a time in any case: from this one, or, while that has nothing to do, from one that posts a read of its own. Where
the processor copies within the post, such a read wakes no other thread. Device memory, which ties a thread to a context, is
this thread's alone.

The library has no blocking wait, so this thread polls while a read is posted here, or a peer reports that it reads from here
(``AgentDriver.pause_seconds``). With nothing to drive it blocks.

A posted read cannot be cancelled, and its bytes may land as long as it is not terminal: nothing of it is released before.
Ending the agent makes every read terminal.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty
from typing import Any, TypeVar

from contract.errors import KvbatonError, TransferError
from engine.connector import KVMemory
from engine.mailbox import Mailbox
from kv_transfer.protocol.reads import BlockPart
from kv_transfer.transports.nixl.agent import Ids, NixlAgent, NixlLibrary, Region
from kv_transfer.transports.nixl.remote_pool import DescribedRegion, RemotePool

logger = logging.getLogger(__name__)
_Command = Callable[["AgentDriver"], object]
_T = TypeVar("_T")
_SPIN_SECONDS = 50e-6
_MIN_PAUSE_SECONDS = 0.05e-3
_MAX_PAUSE_SECONDS = 20e-3
# A pause is this small a part of the time for which nothing has happened.
_IDLE_PER_PAUSE = 250


@dataclass
class ReadStep:
    """A read of blocks of a peer's pool into those of a region with blocks of the same size, whole or a part of each."""

    into: DescribedRegion
    into_ids: Ids
    block_ids: Ids
    part: BlockPart | None = None
    group: int = 0


@dataclass
class SlotsStep:
    """A read of slots of a peer's table of generations into ``RemotePool.found``."""

    slots: tuple[int, ...]


class NixlRead:
    """One read in steps; a step is posted when the one before is terminal.

    The driver carries it on, and one thread waits for it. handles: to be released when the read is terminal.
    """

    def __init__(self, pool: RemotePool, steps: Sequence[ReadStep | SlotsStep]) -> None:
        self.pool = pool
        self.handles: list[Any] = []
        self.is_terminal = False
        self._steps = iter(steps)
        self._posted: Any = None
        self._error: KvbatonError | None = None
        self._changes: Mailbox[None] = Mailbox()

    def advance(self, agent: NixlAgent) -> bool:
        """Post further steps as long as the open one is done; return False if all are. Raises KvbatonError."""
        if self._posted is not None and not agent.is_done(self._posted):
            return True
        for step in self._steps:
            if isinstance(step, SlotsStep):
                self._posted = self.pool.look_at(agent, step.slots)
            else:
                remote = self.pool.groups[step.group].blocks.blocks(step.part)
                self._posted = agent.prepare(
                    step.into.blocks(step.part), step.into_ids, remote, step.block_ids
                )
                self.handles.append(self._posted)
            if not agent.post(self._posted):
                return True
        return False

    def wake(self) -> None:
        """End the current ``wait``, or the next one. Does not block."""
        self._changes.put(None)

    def end(self, error: KvbatonError | None) -> None:
        """Mark the read as terminal, with its error if any."""
        self._error = error
        self.is_terminal = True
        self.wake()

    def wait(self, timeout_seconds: float | None) -> bool:
        """Wait until the read is terminal, ``wake`` is called, or for so long; return True if the read is terminal."""
        if not self.is_terminal:
            with suppress(Empty):
                self._changes.get(timeout_seconds)
        return self.is_terminal

    def check(self) -> None:
        """Raise the error of a terminal read, if any."""
        if self._error is not None:
            raise self._error


class AgentDriver:
    """Owns what is posted to the agent, and ends it. Called by one thread at a time. Raises TransferError after ``close``.

    own_blocks: this worker's, of each group of layers, as the targets of a ``ReadStep``; none before ``register``.
    """

    def __init__(self, agent: NixlAgent) -> None:
        self.own_blocks: list[DescribedRegion] = []
        self._agent = agent
        self._posted: list[NixlRead] = []
        self._pools: set[RemotePool] = set()
        self._served: set[object] = set()
        self._serves_until = 0.0
        self._active_at = 0.0
        self._undo = ExitStack()

    def register(self, pools: Sequence[Region], table: Region) -> bytes:
        """Make all readable by peers; return the metadata that peers need. Called once."""
        for region in (*pools, table):
            self._agent.register(region, self._undo)
        self.own_blocks = [DescribedRegion(self._agent, pool, self._undo) for pool in pools]
        return self._agent.metadata()

    def connect(self, pool: RemotePool, metadata: bytes) -> None:
        """Make a peer's pool readable. Does not wait for the peer. Needs ``disconnect``, also after a failure."""
        self._pools.add(pool)
        pool.enter(self._agent, metadata)

    def land_in(self, pool: RemotePool, region: Region, memory: object) -> None:
        """Make ``region``, which ``memory`` owns, the area that this peer's blocks are read into. Raises TransferError."""
        if pool not in self._pools:
            raise TransferError(f"{pool.who} is disconnected")
        pool.land_in(self._agent, region, memory)

    def leave_landing(self, pool: RemotePool) -> None:
        """Undo ``land_in``, when nothing is posted to it. Raises TransferError."""
        pool.leave_landing()

    def disconnect(self, pool: RemotePool) -> None:
        """Remove a peer's pool, as soon as no read of it is posted."""
        self._pools.discard(pool)
        self._release_unused(pool)

    def serve(self, reader: object) -> None:
        """Drive the library on for this reader, which may read from here, until ``rest``."""
        self._served.add(reader)

    def rest(self, reader: object) -> None:
        """Undo ``serve``."""
        self._served.discard(reader)

    def serve_lost(self, reader: object, seconds: float) -> None:
        """Drive the library on for so long: this reader may read, and cannot report its end any more."""
        self.rest(reader)
        self._serves_until = time.monotonic() + seconds

    def pause_seconds(self) -> float | None:
        """Return how long to wait before the next ``drive``; None: until there is a command."""
        if not self._posted and not self._is_serving:
            return None
        idle = time.monotonic() - self._active_at
        # It grows with the idle time: a peer that is stopped may be so for hours.
        pause = min(max(idle / _IDLE_PER_PAUSE, _MIN_PAUSE_SECONDS), _MAX_PAUSE_SECONDS)
        return pause if idle >= _SPIN_SECONDS else 0.0

    def mark_active(self) -> None:
        """Restart with short pauses."""
        self._active_at = time.monotonic()

    def begin(self, read: NixlRead) -> None:
        """Post the first step of a read; a failure ends it."""
        self._posted.append(read)
        self._advance(read)

    def drive(self) -> None:
        """Let posted reads and those of peers progress."""
        for read in list(self._posted):
            self._advance(read)
        if self._is_serving:
            _logging_failure(self._agent.progress)

    def close(self) -> None:
        """End the agent; every read fails."""
        self.own_blocks = []
        for read in self._posted:
            self._release_handles(read)
        for pool in self._pools | {read.pool for read in self._posted}:
            _logging_failure(pool.release)
        _logging_failure(self._undo.close)
        self._agent.close()
        while self._posted:
            self._posted.pop().end(TransferError("the NIXL agent was closed"))

    @property
    def _is_serving(self) -> bool:
        return bool(self._served) or time.monotonic() < self._serves_until

    def _advance(self, read: NixlRead) -> None:
        """Carry a read on, and end it after its last step or an error."""
        error: KvbatonError | None = None
        try:
            if read.advance(self._agent):
                return
        except KvbatonError as failure:
            error = type(failure)(f"{read.pool.who}: {failure.message}")
        self.mark_active()
        self._posted.remove(read)
        read.end(error)
        self._release_handles(read)
        self._release_unused(read.pool)

    def _release_handles(self, read: NixlRead) -> None:
        for handle in read.handles:
            _logging_failure(partial(self._agent.release, handle))

    def _release_unused(self, pool: RemotePool) -> None:
        """Release a peer's pool if it is disconnected and no read of it is posted."""
        if pool not in self._pools and all(read.pool is not pool for read in self._posted):
            _logging_failure(pool.release)


def _logging_failure(work: Callable[[], None]) -> None:
    """Do what no thread waits for; log a failure."""
    try:
        work()
    except KvbatonError as error:
        logger.warning("%s", error.message)


class NixlThread:
    """Owns the agent and its thread. Every method may be called from any thread; a caller of the driver holds ``_turn``.

    memory: this worker's pool, once it is registered.
    """

    memory: KVMemory | None = None

    def __init__(
        self, library: NixlLibrary, name: str, on_failed: Callable[[str, BaseException], None]
    ) -> None:
        """Start the agent. Raises SettingError if the library cannot work here. on_failed: see ``TransportContext``."""
        self._on_failed = on_failed
        agent = NixlAgent(library, name)
        self._driver = AgentDriver(agent)
        self._commands = Mailbox[_Command | None]()
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kv-nixl", daemon=True)
        self._thread.start()
        try:
            self.ask(lambda _driver: agent.start())
        except BaseException:
            self.close()
            raise

    @property
    def own_blocks(self) -> list[DescribedRegion]:
        """See ``AgentDriver``."""
        return self._driver.own_blocks

    def ask(self, work: Callable[[AgentDriver], _T]) -> _T:
        """Let the thread do it after all earlier commands; return the result. Raises TransferError after ``close``."""
        answer: Future[_T] = Future()

        def run(driver: AgentDriver) -> None:
            try:
                answer.set_result(work(driver))
            except Exception as error:  # noqa: BLE001 - the boundary of the thread: passed to the waiting one
                answer.set_exception(error)

        self._put(run)
        return answer.result()

    def tell(self, command: _Command) -> None:
        """Let the thread do it, unless it is closed. Does not block. An error ends the thread."""
        with suppress(TransferError):
            self._put(command)

    def post(self, read: NixlRead) -> None:
        """Begin a read; a failure ends it. After ``close`` it fails, or this raises TransferError."""
        if read.pool.is_device or not self._turn.acquire(blocking=False):
            self._put(lambda driver: driver.begin(read))
            return
        try:
            self._driver.begin(read)
        finally:
            self._turn.release()
        if not read.is_terminal:
            self.tell(_look_again)

    def close(self) -> None:
        """End the agent and the thread; reads that are not terminal fail. Idempotent."""
        with suppress(TransferError):
            self._put(None)
        self._thread.join()

    def _put(self, command: _Command | None) -> None:
        """Let the thread do it; None ends the thread. Raises TransferError after ``close``."""
        with self._lock:
            if self._is_closed:
                raise TransferError("the NIXL agent is closed")
            self._commands.put(command)

    def _run(self) -> None:
        try:
            while (command := self._next()) is not None:
                with self._turn:
                    command(self._driver)
                    self._driver.drive()
        except Exception as error:  # the boundary of the thread: waiting threads get an error
            logger.exception("the NIXL thread has failed")
            self._on_failed(self._thread.name, error)
        finally:
            with self._turn:
                self._end()

    def _next(self) -> _Command | None:
        """Return the next command, or one that does nothing when it is time to drive; None after ``close``."""
        try:
            command = self._commands.get(self._driver.pause_seconds())
        except Empty:
            return _look_again
        self._driver.mark_active()
        return command

    def _end(self) -> None:
        """End the agent, and every command that still waits."""
        with self._lock:
            self._is_closed = True
        self._driver.close()
        while self._commands.num_waiting:
            if (command := self._commands.get()) is not None:
                command(self._driver)


def _look_again(_driver: AgentDriver) -> None:
    """Do nothing: after each command the thread drives the library on."""
