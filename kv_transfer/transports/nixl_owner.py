"""The one thread that calls the NIXL library for this process's agent.

The library has no blocking wait, so this thread polls: while a read is posted here, or a peer says that it reads from
here. It looks again without a pause for 50 us, then every 0.2 ms, ever more rarely the longer nothing happens (a peer
that is stopped may be for hours). With nothing to drive it blocks.

A posted read cannot be cancelled, and its bytes may land as long as it is not terminal: nothing of it is given back
before. Ending the agent itself makes every read terminal.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from contract.errors import KvbatonError, TransferError
from kv_transfer.transport import BlockPart
from kv_transfer.transports.nixl_agent import DescribedRegion, NixlAgent
from kv_transfer.transports.nixl_library import NixlLibrary
from kv_transfer.transports.nixl_memory import Region
from kv_transfer.transports.nixl_peer import RemotePool
from kv_transfer.transports.nixl_wire import NixlWelcome

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_SPIN_SECONDS = 50e-6
_MIN_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.2e-3, 20e-3
_IDLE_PER_PAUSE = 250
"""A pause is so small a part of the time for which nothing has happened."""


@dataclass(eq=False)
class _Posted:
    """A read that is not terminal; ``outcome`` ends when it is."""

    handle: Any
    pool: RemotePool
    outcome: "Future[None]" = field(default_factory=Future)


class NixlOwner:
    """Owns the agent and its thread. Every method may be called from any thread.

    pool: this worker's own blocks, None until ``register``.
    """

    def __init__(
        self,
        library: NixlLibrary,
        name: str,
        on_failed: Callable[[str, BaseException], None] = lambda _thread, _error: None,
    ) -> None:
        """Bring the agent up. Raises SettingError where the library cannot work here.

        on_failed: see ``TransportContext.on_thread_failed``.
        """
        self._on_failed = on_failed
        self.pool: Region | None = None
        self._pool_blocks: DescribedRegion | None = None
        self._agent: NixlAgent | None = None
        self._posted: list[_Posted] = []
        self._pools: set[RemotePool] = set()
        self._num_serving, self._active_at = 0, 0.0
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kv-nixl", daemon=True)
        self._thread.start()
        try:
            self._ask(partial(self._create, library, name))
        except BaseException:
            self.close()
            raise

    def register(self, pool: Region, nonce: Region) -> bytes:
        """Make both readable by peers; returns what they need to know of the agent. Called once."""
        return self._ask(partial(self._register, pool, nonce))

    def connect(self, agent_name: str, who: str, welcome: NixlWelcome) -> RemotePool:
        """Know a peer's pool. Raises KvbatonError. Does not wait for the peer; each call needs a ``disconnect``."""
        pool = RemotePool(agent_name, who, welcome)
        self._ask(partial(self._enter, pool, welcome.agent))
        return pool

    def disconnect(self, pool: RemotePool) -> None:
        """Forget a peer's pool, as soon as no read of it is posted. Does not block."""
        self._tell(partial(self._leave, pool))

    def read(
        self,
        pool: RemotePool,
        remote_ids: Sequence[int],
        local_ids: Sequence[int],
        part: BlockPart | None = None,
    ) -> "Future[None]":
        """Post a read into the same part of blocks of this worker's pool. The future ends when the read is terminal."""
        return self._ask(
            lambda: self._post(
                pool, self._own().blocks(part), local_ids, pool.blocks.blocks(part), remote_ids
            )
        )

    def read_into_bounce(
        self, pool: RemotePool, remote_ids: Sequence[int], part: BlockPart | None = None
    ) -> "Future[None]":
        """The same, into the first blocks of ``pool.bounce``."""
        ids, bounce = range(len(remote_ids)), pool.bounce_blocks
        return self._ask(
            lambda: self._post(pool, bounce.blocks(part), ids, pool.blocks.blocks(part), remote_ids)
        )

    def read_nonce(self, pool: RemotePool) -> "Future[None]":
        """The same with the peer's nonce, into ``pool.found_nonce``."""
        return self._ask(lambda: self._post(pool, pool.nonce_blocks.blocks(), [0], pool.nonce.blocks(), [0]))

    def begin_serving(self) -> None:
        """A peer may read from here: drive the library on. Does not block."""
        self._tell(partial(self._serve, 1))

    def end_serving(self) -> None:
        """It does not any more; called once for each ``begin_serving``. Does not block."""
        self._tell(partial(self._serve, -1))

    def is_driving(self) -> bool:
        """Something is read, from here or by this worker, so that the thread does not rest."""
        return self._ask(lambda: bool(self._posted or self._num_serving))

    def close(self) -> None:
        """End the agent and the thread; reads that are not terminal fail. Idempotent."""
        self._tell(None)
        with self._lock:
            self._is_closed = True
        self._thread.join()

    def _tell(self, command: Callable[[], None] | None) -> None:
        with self._lock:
            if not self._is_closed:
                self._commands.put(command)

    def _ask(self, work: Callable[[], _T]) -> _T:
        """Have the thread do it, and wait for that. Raises TransferError after ``close``."""
        answer: Future[_T] = Future()
        with self._lock:
            if self._is_closed:
                raise TransferError("the NIXL agent is closed")
            self._commands.put(partial(_answer, answer, work))
        return answer.result()

    def _run(self) -> None:
        try:
            while (command := self._next()) is not None:
                command()
                self._drive()
        except Exception as error:  # the boundary of the thread: whoever waits hears that it is over
            logger.exception("the NIXL thread has failed")
            self._on_failed(self._thread.name, error)
        finally:
            self._end()

    def _next(self) -> Callable[[], None] | None:
        """The next command, or one that does nothing when it is time to look again; None after ``close``."""
        command = None
        try:
            if not self._posted and not self._num_serving:
                command = self._commands.get()
            else:
                idle = time.monotonic() - self._active_at
                pause = min(max(idle / _IDLE_PER_PAUSE, _MIN_PAUSE_SECONDS), _MAX_PAUSE_SECONDS)
                command = self._commands.get(idle >= _SPIN_SECONDS, pause)
        except queue.Empty:
            return _look_again
        self._active_at = time.monotonic()
        return command

    def _drive(self) -> None:
        for posted in list(self._posted):
            try:
                if self._alive().is_done(posted.handle):
                    self._finish(posted, None)
            except KvbatonError as error:
                self._finish(posted, error)
        if self._num_serving:
            _quietly(self._alive().progress)

    def _finish(self, posted: _Posted, error: KvbatonError | None) -> None:
        """The read is terminal."""
        self._active_at = time.monotonic()
        self._posted.remove(posted)
        posted.pool.num_posted -= 1
        _quietly(partial(self._alive().release, posted.handle))
        _quietly(posted.pool.give_back)
        if error is None:
            posted.outcome.set_result(None)
        else:
            posted.outcome.set_exception(type(error)(f"{posted.pool.who}: {error.message}"))

    def _end(self) -> None:
        """End the agent, and everything that still waits."""
        with self._lock:
            self._is_closed = True
        ended, agent, self._agent = self._posted, self._agent, None
        pools = self._pools | {posted.pool for posted in ended}
        self._posted, self._pool_blocks = [], None
        if agent is not None:
            for posted in ended:
                _quietly(partial(agent.release, posted.handle))
            for pool in pools:
                _quietly(pool.abandon)
            agent.close()
        for posted in ended:
            posted.outcome.set_exception(TransferError("the NIXL agent was closed"))
        with suppress(queue.Empty):
            while True:
                if (command := self._commands.get_nowait()) is not None:
                    command()

    def _alive(self) -> NixlAgent:
        if self._agent is None:
            raise TransferError("the NIXL agent is closed")
        return self._agent

    def _own(self) -> DescribedRegion:
        if self._pool_blocks is None:
            raise TransferError("the blocks of this worker's pool cannot be read into")
        return self._pool_blocks

    def _create(self, library: NixlLibrary, name: str) -> None:
        self._agent = NixlAgent(library, name)

    def _register(self, pool: Region, nonce: Region) -> bytes:
        agent = self._alive()
        agent.register(pool)
        agent.register(nonce)
        if not pool.is_device:
            self._pool_blocks = DescribedRegion(agent, pool)
            self.pool = pool
        return agent.metadata()

    def _post(
        self, pool: RemotePool, local: Any, local_ids: Sequence[int], remote: Any, remote_ids: Sequence[int]
    ) -> "Future[None]":
        agent = self._alive()
        posted = _Posted(agent.prepare(local, local_ids, remote, remote_ids), pool)
        self._posted.append(posted)
        pool.num_posted += 1
        try:
            is_done = agent.post(posted.handle)
        except KvbatonError as error:
            self._finish(posted, error)
            return posted.outcome
        if is_done:
            self._finish(posted, None)
        return posted.outcome

    def _enter(self, pool: RemotePool, metadata: bytes) -> None:
        pool.enter(self._alive(), metadata)
        self._pools.add(pool)

    def _leave(self, pool: RemotePool) -> None:
        self._pools.discard(pool)
        _quietly(pool.leave)

    def _serve(self, change: int) -> None:
        self._num_serving += change


def _look_again() -> None:
    """Nothing was asked; posted reads and readers are looked at anyway."""


def _quietly(work: Callable[[], None]) -> None:
    """Do what nobody waits for; a failure is logged."""
    try:
        work()
    except KvbatonError as error:
        logger.warning("%s", error.message)


def _answer(answer: "Future[_T]", work: Callable[[], _T]) -> None:
    """Carry out what somebody waits for; whatever it raises is raised there."""
    try:
        answer.set_result(work())
    except Exception as error:  # noqa: BLE001 - the boundary of the thread: handed on to whoever asked
        answer.set_exception(error)
