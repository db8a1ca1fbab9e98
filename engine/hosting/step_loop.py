"""The loop around an engine core: block for input while idle, else drain it, step, send the outputs.

The same loop runs in a thread beside its client and in a process of its own; only the queue's other end and ``emit``
differ. ``run_engine`` is the one boundary where any exception is caught: a step that raises ends every request.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty
from typing import Literal

from contract.errors import ErrorKind, KvbatonError
from contract.requests import EngineOutput
from engine.connector import ConnectorFactory
from engine.core import EngineCore, ExecutorStart, start_executor
from engine.hosting.messages import (
    Abort,
    AbortRequest,
    AddRequest,
    Call,
    CallResult,
    FromEngine,
    Health,
    Ping,
    Ready,
    Shutdown,
    StartFailed,
    StepOutputs,
    Stopped,
    ToEngine,
)
from engine.hosting.watching import STEP_LOOP
from engine.mailbox import Mailbox
from engine.settings import EngineSettings

logger = logging.getLogger(__name__)

WAKE: Literal["wake"] = "wake"
Inbox = Mailbox[ToEngine | Literal["wake"] | Exception]
"""Input from any thread. WAKE: the connector has news. An exception: the input itself is broken."""
Emit = Callable[[FromEngine], None]


ProgressOf = Callable[[], dict[str, int]]
"""The counts of the threads that work, from any thread, without waiting for any of them."""


def _nobody(progress: ProgressOf) -> None:
    """Nobody watches."""


def _nothing() -> None:
    """No preparation."""


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """How to build an engine in another thread or process; everything in it is picklable where a process needs it.

    start: brings up the executor. idle_seconds: how long an idle engine waits for input before it says that it lives.
    prepare: called first in an engine's own process, to set up its log for example.
    """

    settings: EngineSettings
    connector_factory: ConnectorFactory | None = None
    start: ExecutorStart = start_executor
    idle_seconds: float = 10.0
    prepare: Callable[[], None] = _nothing


class StepLoop:
    """Joins a core with its input and output. ``run`` returns after Shutdown and lets exceptions of a step through."""

    def __init__(self, core: EngineCore, inbox: Inbox, emit: Emit, idle_seconds: float) -> None:
        self._core = core
        self._inbox = inbox
        self._emit = emit
        self._idle_seconds = idle_seconds
        self._was_woken = False
        self._is_stopping = False
        self._num_done = 0
        self._unsent: dict[int, list[EngineOutput]] = {}
        """Of the last step: they go out while the next one is computed, or at once where there is none."""

    def run(self) -> None:
        """Step until told to stop."""
        try:
            while not self._is_stopping:
                if self._has_work():
                    self._drain()
                else:
                    self._send()
                    self._wait()
                self._hold()
                if not self._is_stopping and self._has_work():
                    self._step()
        finally:
            self._send()

    def progress(self) -> dict[str, int]:
        """Return how far the loop and the connector's threads have come; from any thread."""
        return {STEP_LOOP: self._num_done, **self._core.progress()}

    def _has_work(self) -> bool:
        return self._was_woken or self._core.needs_step()

    def _step(self) -> None:
        """One step, and those that begin before the one before them is taken in."""
        self._was_woken = False
        self._compute()
        while self._core.is_under_way:
            self._compute()

    def _compute(self) -> None:
        self._unsent = self._core.step(self._send, self._is_quiet)
        self._num_done += 1

    def _hold(self) -> None:
        """While a request is about to arrive that would miss a step that began now."""
        while not self._is_stopping and (seconds := self._core.seconds_to_hold()) > 0:
            self._send()
            try:
                self._handle(self._inbox.get(seconds))
            except Empty:
                return
            self._drain()

    def _is_quiet(self) -> bool:
        return not self._inbox.num_waiting

    def _send(self) -> None:
        unsent, self._unsent = self._unsent, {}
        send_outputs(self._core, unsent, self._emit)

    def _drain(self) -> None:
        while self._inbox.num_waiting:
            self._handle(self._inbox.get())

    def _wait(self) -> None:
        """Block for input until a deadline is due, or else for ``idle_seconds``: then report."""
        until_deadline = self._core.seconds_to_deadline()
        is_deadline_first = until_deadline is not None and until_deadline < self._idle_seconds
        try:
            item = self._inbox.get(until_deadline if is_deadline_first else self._idle_seconds)
        except Empty:
            if is_deadline_first:
                self._was_woken = True
            else:
                self._report()
            return
        self._core.rested()
        self._handle(item)
        self._drain()

    def _report(self) -> None:
        stats = self._core.scheduler.make_stats()
        logger.info(
            "idle: %d running, %d waiting, KV cache %.1f %% used, %d of %d prompt tokens cached",
            stats.num_running_reqs,
            stats.num_waiting_reqs,
            100 * stats.kv_cache_usage,
            stats.prefix_cache_stats.hits,
            stats.prefix_cache_stats.queries,
        )
        self._emit(Health(stats))

    def _handle(self, item: ToEngine | Literal["wake"] | Exception) -> None:
        self._num_done += 1
        match item:
            case AddRequest(request):
                self._core.add_request(request)
            case Abort(keys):
                self._core.abort(keys)
            case AbortRequest(request_id, attempt, choice):
                self._core.abort_request(request_id, attempt, choice)
            case Call():
                self._emit(self._call(item))
            case Ping():
                pass  # it has been counted
            case Shutdown():
                self._is_stopping = True
            case Exception():
                raise item
            case _:
                self._was_woken = True

    def _call(self, call: Call) -> CallResult:
        try:
            return CallResult(call.call_id, self._core.call(call.method, call.args))
        except KvbatonError as error:
            return CallResult(call.call_id, None, error.kind.value, error.message)
        except (AssertionError, TypeError) as error:
            logger.exception("utility %s failed", call.method)
            return CallResult(call.call_id, None, ErrorKind.INTERNAL.value, f"{call.method}: {error!r}")


def send_outputs(core: EngineCore, outputs: dict[int, list[EngineOutput]], emit: Emit) -> None:
    """One message for each client that has something to hear."""
    for of_client in outputs.values():
        emit(StepOutputs(of_client, core.scheduler.make_stats()))


def run_engine(
    plan: EnginePlan, inbox: Inbox, emit: Emit, watched_by: Callable[[ProgressOf], None] = _nobody
) -> bool:
    """Build a core, say so, run it until Shutdown. True when it ended as asked.

    The first message is Ready or StartFailed, the last one Stopped. Any exception ends here: one in a step ends
    every request with an error: of its own kind where it has one, else "internal".

    watched_by: gets what shows the progress, before the first message.
    """
    core: EngineCore | None = None
    try:
        core = EngineCore(
            plan.settings, plan.connector_factory, wake=lambda: inbox.put(WAKE), start=plan.start
        )
        loop = StepLoop(core, inbox, emit, plan.idle_seconds)
        watched_by(loop.progress)
        emit(Ready(core.info))
        loop.run()
        send_outputs(core, core.shutdown(), emit)
        emit(Stopped())
    except Exception as error:  # noqa: BLE001 the step loop's one boundary
        _give_up(core, error, emit)
        return False
    return True


def _give_up(core: EngineCore | None, error: Exception, emit: Emit) -> None:
    if core is not None:
        logger.error("the engine failed", exc_info=error)
        kind = error.kind if isinstance(error, KvbatonError) else ErrorKind.INTERNAL
        send_outputs(core, core.scheduler.fail_all(kind, f"the engine failed: {error!r}"), emit)
        emit(Stopped(repr(error)))
        core.close()
    elif isinstance(error, KvbatonError):
        emit(StartFailed(error.kind.value, error.message, error.param))
    else:
        logger.error("the engine could not start", exc_info=error)
        emit(StartFailed(ErrorKind.INTERNAL.value, f"the engine could not start: {error!r}"))
