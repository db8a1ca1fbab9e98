"""The thread that owns this process's NIXL agent, and lends it while it rests.

The agent is brought up so that the library serializes its calls (STRICT, which is SERIALIZED in UCX), and they come from
one thread at a time in any case: from this one, or, where that has nothing to do, from one that posts a read of its own.
Where the processor copies within the post, such a read costs no other thread's waking. Device memory, which ties a thread
to a context, is this thread's alone.

The library has no blocking wait, so this thread polls: while a read is posted here, or a peer says that it reads from
here. It looks again without a pause for 50 us, then every 0.2 ms, ever more rarely the longer nothing happens (a peer
that is stopped may be for hours). With nothing to drive it blocks.

A posted read cannot be cancelled, and its bytes may land as long as it is not terminal: nothing of it is given back
before. Ending the agent itself makes every read terminal.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Empty
from typing import TypeVar

from contract.errors import KvbatonError, TransferError
from engine.mailbox import Mailbox
from kv_transfer.transports.nixl.agent import DescribedRegion, NixlAgent
from kv_transfer.transports.nixl.binding import NixlLibrary
from kv_transfer.transports.nixl.memory import Region
from kv_transfer.transports.nixl.peer import RemotePool
from kv_transfer.transports.nixl.read import NixlRead
from kv_transfer.transports.nixl.wire import NixlWelcome

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_SPIN_SECONDS = 50e-6
_MIN_PAUSE_SECONDS = 0.2e-3
_MAX_PAUSE_SECONDS = 20e-3
_IDLE_PER_PAUSE = 250
"""A pause is so small a part of the time for which nothing has happened."""


class NixlThread:
    """Owns the agent and its thread. Every method may be called from any thread; who calls the library holds ``_turn``.

    pool: this worker's own blocks, and pool_blocks, for a ``ReadStep`` into them: None until ``register``, or on a device.
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
        self.pool_blocks: DescribedRegion | None = None
        self._agent: NixlAgent | None = None
        self._posted: list[NixlRead] = []
        self._pools: set[RemotePool] = set()
        self._num_serving = 0
        self._serves_until = 0.0
        self._active_at = 0.0
        self._commands = Mailbox[Callable[[], None] | None]()
        self._lock, self._turn = threading.Lock(), threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kv-nixl", daemon=True)
        self._thread.start()
        try:
            self._ask(partial(self._create, library, name))
        except BaseException:
            self.close()
            raise

    def register(self, pool: Region, table: Region) -> bytes:
        """Make both readable by peers; returns what they need to know of the agent. Called once."""
        return self._ask(partial(self._register, pool, table))

    def connect(self, agent_name: str, who: str, welcome: NixlWelcome) -> RemotePool:
        """Know a peer's pool. Raises KvbatonError. Does not wait for the peer; each call needs a ``disconnect``."""
        pool = RemotePool(agent_name, who, welcome)
        self._ask(partial(self._enter, pool, welcome.agent))
        return pool

    def disconnect(self, pool: RemotePool) -> None:
        """Forget a peer's pool, as soon as no read of it is posted. Does not block."""
        self._tell(partial(self._leave, pool))

    def post(self, read: NixlRead) -> None:
        """Carry a read out; what goes wrong ends it. Raises TransferError after ``close``.

        Where the thread rests, the caller posts it, which may copy the bytes: then nobody has to be woken, nor waited for.
        """
        if read.pool.region.is_device or not self._turn.acquire(blocking=False):
            self._put(partial(self._begin, read))
            return
        try:
            self._begin(read)
        finally:
            self._turn.release()
        if not read.is_terminal:
            self._tell(_look_again)

    def begin_serving(self) -> None:
        """A peer may read from here: drive the library on. Does not block."""
        self._tell(partial(self._serve, 1))

    def end_serving(self) -> None:
        """It does not any more; called once for each ``begin_serving``. Does not block."""
        self._tell(partial(self._serve, -1))

    def serve_on(self, seconds: float) -> None:
        """A peer cannot say any more whether it reads: drive the library on for so long. Does not block."""
        self._tell(partial(self._serve_on, time.monotonic() + seconds))

    def settle(self) -> None:
        """Until the thread has done all that it was told before."""
        self._ask(_look_again)

    def is_driving(self) -> bool:
        """Something is read, from here or by this worker, so that the thread does not rest."""
        return self._ask(lambda: bool(self._posted or self._is_serving))

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
        self._put(partial(_answer, answer, work))
        return answer.result()

    def _put(self, command: Callable[[], None]) -> None:
        with self._lock:
            if self._is_closed:
                raise TransferError("the NIXL agent is closed")
            self._commands.put(command)

    def _run(self) -> None:
        try:
            while (command := self._next()) is not None:
                with self._turn:
                    command()
                    self._drive()
        except Exception as error:  # the boundary of the thread: whoever waits hears that it is over
            logger.exception("the NIXL thread has failed")
            self._on_failed(self._thread.name, error)
        finally:
            with self._turn:
                self._end()

    def _next(self) -> Callable[[], None] | None:
        """The next command, or one that does nothing when it is time to look again; None after ``close``."""
        command = None
        try:
            if not self._posted and not self._is_serving:
                command = self._commands.get()
            else:
                idle = time.monotonic() - self._active_at
                pause = min(max(idle / _IDLE_PER_PAUSE, _MIN_PAUSE_SECONDS), _MAX_PAUSE_SECONDS)
                command = self._commands.get(pause if idle >= _SPIN_SECONDS else 0.0)
        except Empty:
            return _look_again
        self._active_at = time.monotonic()
        return command

    def _drive(self) -> None:
        for read in list(self._posted):
            try:
                is_done = self._alive().is_done(read.posted)
            except KvbatonError as error:
                self._finish(read, error)
                continue
            if is_done:
                self._advance(read)
            else:
                read.look_at_clock()
        if self._is_serving:
            _quietly(self._alive().progress)

    def _begin(self, read: NixlRead) -> None:
        self._posted.append(read)
        read.pool.num_posted += 1
        self._advance(read)

    def _advance(self, read: NixlRead) -> None:
        """Nothing of it is open: post its next step. It ends behind the last one, or with what goes wrong."""
        try:
            is_open = read.post_next(self._alive())
        except KvbatonError as error:
            self._finish(read, error)
            return
        if not is_open:
            self._finish(read, None)

    def _finish(self, read: NixlRead, error: KvbatonError | None) -> None:
        """The read is terminal."""
        self._active_at = time.monotonic()
        self._posted.remove(read)
        read.pool.num_posted -= 1
        read.end(None if error is None else type(error)(f"{read.pool.who}: {error.message}"))
        for handle in read.handles:
            _quietly(partial(self._alive().release, handle))
        if read.pool.is_left:
            _quietly(read.pool.give_back)

    def _end(self) -> None:
        """End the agent, and everything that still waits."""
        with self._lock:
            self._is_closed = True
        ended = self._posted
        agent = self._agent
        self._agent = None
        pools = self._pools | {read.pool for read in ended}
        self._posted = []
        self.pool_blocks = None
        if agent is not None:
            for read in ended:
                for handle in read.handles:
                    _quietly(partial(agent.release, handle))
            for pool in pools:
                _quietly(pool.abandon)
            agent.close()
        for read in ended:
            read.end(TransferError("the NIXL agent was closed"))
        while self._commands.num_waiting:
            if (command := self._commands.get()) is not None:
                command()

    def _alive(self) -> NixlAgent:
        if self._agent is None:
            raise TransferError("the NIXL agent is closed")
        return self._agent

    def _create(self, library: NixlLibrary, name: str) -> None:
        self._agent = NixlAgent(library, name)

    def _register(self, pool: Region, table: Region) -> bytes:
        agent = self._alive()
        agent.register(pool)
        agent.register(table)
        if not pool.is_device:
            self.pool_blocks = DescribedRegion(agent, pool)
            self.pool = pool
        return agent.metadata()

    def _enter(self, pool: RemotePool, metadata: bytes) -> None:
        pool.enter(self._alive(), metadata)
        self._pools.add(pool)

    def _leave(self, pool: RemotePool) -> None:
        self._pools.discard(pool)
        _quietly(pool.leave)

    def _serve(self, change: int) -> None:
        self._num_serving += change

    def _serve_on(self, until: float) -> None:
        self._serves_until = max(self._serves_until, until)

    @property
    def _is_serving(self) -> bool:
        return self._num_serving > 0 or time.monotonic() < self._serves_until


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
