"""Builds an engine from a plan and runs it, here or in a thread of its own; any exception of a step is caught here."""

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from contract.errors import ErrorKind, KvbatonError
from engine.connecting import Transfers
from engine.core import EngineCore
from engine.hosting.messages import FromEngine, Ready, Shutdown, StartFailed, Stopped, ToEngine
from engine.hosting.sharing import MAX_UNREAD, Sharing
from engine.settings import EngineSettings
from engine.startup import ExecutorStart, start_executor
from engine.stepping.gate import StepGate
from engine.stepping.loop import (
    OWNER,
    WAKE,
    Emit,
    Emits,
    Inbox,
    Put,
    StepLoop,
    refuse_to_share,
    send_outputs,
    send_to_all,
)

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


def _nothing(*_: object) -> None:
    """Do nothing."""


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """The parts of an engine that is to be built in another thread, or process (then all of them are picklable).

    start: starts the executor. idle_seconds: how long an idle engine waits for input before it reports its health.
    prepare: called first in an engine's own process, for example to set up its log. gate: makes the gate of the engine's
    steps, which may have functions called between them; None: the one of the settings. max_unread: the number of messages
    that may wait for a further client, before it is dropped because it does not read them.
    """

    settings: EngineSettings
    transfers: Transfers | None = None
    start: ExecutorStart = start_executor
    idle_seconds: float = 10.0
    prepare: Callable[[], None] = _nothing
    gate: Callable[[Put], StepGate] | None = None
    max_unread: int = MAX_UNREAD


def run_engine(
    plan: EnginePlan, inbox: Inbox, emit: Emit, on_start: Callable[[StepLoop], None] = _nothing
) -> bool:
    """Build a core and run it until Shutdown; return whether it ended as asked.

    The first message is Ready or StartFailed, the last one Stopped. All exceptions are caught here; one in a step ends
    every request with an error, of the exception's own kind if it has one, else "internal".

    emit: the way to the client that starts the engine. on_start: receives the loop before the first message. Other threads
    may call its ``progress`` and ``expect``.
    """
    core: EngineCore | None = None
    emits: Emits = {OWNER: emit}
    sharing = Sharing(inbox, emits, plan.max_unread)
    try:
        core = EngineCore(
            plan.settings,
            plan.transfers,
            wake=lambda: inbox.put(WAKE),
            start=plan.start,
            gate=plan.gate(inbox.put) if plan.gate is not None else None,
        )
        share = sharing.share if plan.settings.data_parallel_size == 1 else refuse_to_share
        loop = StepLoop(core, inbox, emits, plan.idle_seconds, share)
        on_start(loop)
        emit(Ready(core.info))
        loop.run()
        send_outputs(core, core.shutdown(), emits)
        send_to_all(Stopped(), emits)
    except Exception as error:  # noqa: BLE001 the step loop's one boundary
        _give_up(core, error, emits)
        return False
    finally:
        sharing.close()
    return True


def _give_up(core: EngineCore | None, error: Exception, emits: Emits) -> None:
    if core is not None:
        logger.error("the engine failed", exc_info=error)
        kind = error.kind if isinstance(error, KvbatonError) else ErrorKind.INTERNAL
        send_outputs(core, core.scheduler.fail_all(kind, f"the engine failed: {error!r}"), emits)
        send_to_all(Stopped(repr(error)), emits)
        core.close()
    elif isinstance(error, KvbatonError):
        emits[OWNER](StartFailed(error.kind.value, error.message, error.param))
    else:
        logger.error("the engine could not start", exc_info=error)
        emits[OWNER](StartFailed(ErrorKind.INTERNAL.value, f"the engine could not start: {error!r}"))


class EngineThread:
    """An ``EngineLink`` over a queue and ``call_soon_threadsafe``."""

    def __init__(self, plan: EnginePlan) -> None:
        self._plan = plan
        self._inbox: Inbox = Inbox()
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[bool] = self._loop.create_future()

    def start(self, receive: Callable[[FromEngine], None]) -> None:
        """Start the thread; see EngineLink."""
        threading.Thread(target=self._run, args=(receive,), name="engine-core", daemon=True).start()

    def send(self, message: ToEngine) -> None:
        """Send a message; see EngineLink."""
        self._inbox.put(message)

    def abandon(self) -> None:
        """End the thread as soon as it has started; see EngineLink."""
        self._inbox.put(Shutdown())

    @property
    def complaint(self) -> str | None:
        """See EngineLink. A thread of this process is not watched."""
        return None

    async def wait_ended(self) -> bool:
        """Wait until the thread has ended; see EngineLink."""
        return await self._ended

    def _run(self, receive: Callable[[FromEngine], None]) -> None:
        has_ended_well = False
        try:
            has_ended_well = run_engine(self._plan, self._inbox, lambda message: self._post(receive, message))
        finally:
            self._post(self._ended.set_result, has_ended_well)

    def _post(self, function: Callable[[_T], None], value: _T) -> None:
        """Call ``function`` in the event loop, unless that is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, value)
