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
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty
from typing import TypeVar

from contract.errors import TransferError
from engine.connector import KVMemory
from engine.mailbox import Mailbox
from kv_transfer.transports.nixl.agent import NixlAgent, NixlLibrary
from kv_transfer.transports.nixl.reads import AgentDriver, NixlRead
from kv_transfer.transports.nixl.remote_pool import DescribedRegion

logger = logging.getLogger(__name__)
_Command = Callable[[AgentDriver], object]
_T = TypeVar("_T")


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
    def pool_blocks(self) -> DescribedRegion | None:
        """See ``AgentDriver``."""
        return self._driver.pool_blocks

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
        if read.pool.region.is_device or not self._turn.acquire(blocking=False):
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
