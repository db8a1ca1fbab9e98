"""The thread that owns this process's NIXL agent, and lends it to other threads while it rests.

The agent is started so that the library serializes its calls (STRICT, which is SERIALIZED in UCX), and they come from one
thread at a time in any case: from this one, or, while that has nothing to do, from one that posts a read of its own. Where
the processor copies within the post, such a read wakes no other thread. Device memory, which ties a thread to a context, is
this thread's alone.

The library has no blocking wait, so this thread polls while a read is posted here, or a peer reports that it reads from here
(``AgentDriver.pause_seconds``). With nothing to drive it blocks.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty
from typing import TypeVar

from contract.errors import TransferError
from engine.mailbox import Mailbox
from kv_transfer.transports.nixl.agent import NixlLibrary, Region
from kv_transfer.transports.nixl.reads import AgentDriver, NixlRead
from kv_transfer.transports.nixl.remote_pool import DescribedRegion, RemotePool

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


class NixlThread:
    """Owns the agent and its thread. Every method may be called from any thread; a caller of the driver holds ``_turn``."""

    def __init__(
        self,
        library: NixlLibrary,
        name: str,
        on_failed: Callable[[str, BaseException], None] = lambda _thread, _error: None,
    ) -> None:
        """Start the agent. Raises SettingError if the library cannot work here."""
        self._on_failed = on_failed
        self._driver = AgentDriver()
        self._commands = Mailbox[Callable[[], None] | None]()
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kv-nixl", daemon=True)
        self._thread.start()
        try:
            self._ask(partial(self._driver.start, library, name))
        except BaseException:
            self.close()
            raise

    @property
    def pool_blocks(self) -> DescribedRegion | None:
        """This worker's own blocks, as the target of a ``ReadStep``: None before ``register``, or on a device."""
        return self._driver.pool_blocks

    def register(self, pool: Region, table: Region) -> bytes:
        """Make both readable by peers; return the metadata that peers need. Called once."""
        return self._ask(partial(self._driver.register, pool, table))

    def connect(self, pool: RemotePool, metadata: bytes) -> None:
        """Make a peer's pool readable. Raises KvbatonError. Does not wait for the peer; each call needs a ``disconnect``."""
        self._ask(partial(self._driver.connect, pool, metadata))

    def disconnect(self, pool: RemotePool) -> None:
        """Remove a peer's pool, as soon as no read of it is posted. Does not block."""
        self._tell(partial(self._driver.disconnect, pool))

    def post(self, read: NixlRead) -> None:
        """Begin a read; a failure ends it. Raises TransferError after ``close``.

        While the thread rests the caller posts the read, which may copy the bytes: then no thread is woken or waited for.
        """
        if read.pool.region.is_device or not self._turn.acquire(blocking=False):
            self._put(partial(self._driver.begin, read))
            return
        try:
            self._driver.begin(read)
        finally:
            self._turn.release()
        if not read.is_terminal:
            self._tell(_look_again)

    def begin_serving(self) -> None:
        """Drive the library on: a peer may read from here. Does not block."""
        self._tell(partial(self._driver.serve, 1))

    def end_serving(self) -> None:
        """Undo one ``begin_serving``. Does not block."""
        self._tell(partial(self._driver.serve, -1))

    def serve_on(self, seconds: float) -> None:
        """Drive the library on for so long: a peer may read that cannot report its end any more. Does not block."""
        self._tell(partial(self._driver.serve_until, time.monotonic() + seconds))

    def settle(self) -> None:
        """Wait until all earlier commands are done."""
        self._ask(_look_again)

    def is_driving(self) -> bool:
        """Return True if the thread does not rest, because something is read from here or by this worker."""
        return self._ask(lambda: self._driver.is_active)

    def close(self) -> None:
        """End the agent and the thread; reads that are not terminal fail. Idempotent."""
        self._tell(None)
        with self._lock:
            self._is_closed = True
        self._thread.join()

    def _tell(self, command: Callable[[], None] | None) -> None:
        """Let the thread do it, unless it is closed; None ends the thread."""
        with suppress(TransferError):
            self._put(command)

    def _put(self, command: Callable[[], None] | None) -> None:
        """Let the thread do it. Raises TransferError after ``close``."""
        with self._lock:
            if self._is_closed:
                raise TransferError("the NIXL agent is closed")
            self._commands.put(command)

    def _ask(self, work: Callable[[], _T]) -> _T:
        """Let the thread do it, and return the result. Raises TransferError after ``close``."""
        answer: Future[_T] = Future()
        self._put(partial(_answer, answer, work))
        return answer.result()

    def _run(self) -> None:
        try:
            while (command := self._next()) is not None:
                with self._turn:
                    command()
                    self._driver.drive()
        except Exception as error:  # the boundary of the thread: waiting threads get an error
            logger.exception("the NIXL thread has failed")
            self._on_failed(self._thread.name, error)
        finally:
            with self._turn:
                self._end()

    def _next(self) -> Callable[[], None] | None:
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
                command()


def _look_again() -> None:
    """Do nothing: after each command the thread drives the library on."""


def _answer(answer: "Future[_T]", work: Callable[[], _T]) -> None:
    """Do the work of an ``_ask``; any error is raised there."""
    try:
        answer.set_result(work())
    except Exception as error:  # noqa: BLE001 - the boundary of the thread: passed to the waiting one
        answer.set_exception(error)
