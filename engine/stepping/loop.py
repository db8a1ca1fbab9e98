"""The loop around an engine core: process messages, start a step when its gate allows it, send the outputs.

The same loop runs in a thread beside its client and in a process of its own; only the other end of the queue and ``emit``
differ.
"""

import logging
from collections.abc import Callable
from queue import Empty
from typing import Literal

from contract.errors import ErrorKind, KvbatonError
from contract.outputs import EngineOutput
from engine.core import EngineCore
from engine.hosting.messages import (
    Abort,
    AbortRequest,
    AddRequest,
    Call,
    CallResult,
    FromEngine,
    Health,
    Ping,
    Shutdown,
    StepOutputs,
    ToEngine,
)
from engine.hosting.watching import STEP_LOOP
from engine.mailbox import Mailbox

logger = logging.getLogger(__name__)

WAKE: Literal["wake"] = "wake"
Inbox = Mailbox[ToEngine | Literal["wake"] | Exception]
"""Messages from any thread. WAKE: the connector has news. An exception: the input itself is broken."""
Emit = Callable[[FromEngine], None]


class StepLoop:
    """Joins a core with its input and output. ``run`` returns after Shutdown, and raises what a step raises."""

    def __init__(self, core: EngineCore, inbox: Inbox, emit: Emit, idle_seconds: float) -> None:
        self._core = core
        self._inbox = inbox
        self._emit = emit
        self._idle_seconds = idle_seconds
        self._is_stopping = False
        self._num_done = 0
        self._unsent: dict[int, list[EngineOutput]] = {}
        """Outputs of the last step: sent while the next one is computed, or at once where there is none."""

    def run(self) -> None:
        """Run steps until Shutdown."""
        try:
            while self._wait_for_start():
                self._step()
        finally:
            self._send()

    def progress(self) -> dict[str, int]:
        """Return how far the loop and the connector's threads have come; from any thread."""
        return {STEP_LOOP: self._num_done, **self._core.progress()}

    def _wait_for_start(self) -> bool:
        """Process messages until a step may start; return False once the loop is to end."""
        self._process_all()
        while not self._is_stopping:
            delay = self._core.seconds_to_start()
            if delay == 0:
                return True
            if delay is None:
                self._wait_idle()
            elif not self._wait(min(delay, self._idle_seconds)) and delay <= self._idle_seconds:
                return True
        return False

    def _step(self) -> None:
        """Run a step, and those that start before the results of the one before are processed."""
        self._compute()
        while self._core.is_under_way:
            self._compute()

    def _compute(self) -> None:
        self._unsent = self._core.step(self._send, self._is_quiet)
        self._num_done += 1

    def _is_quiet(self) -> bool:
        return not self._inbox.num_waiting

    def _send(self) -> None:
        unsent = self._unsent
        self._unsent = {}
        send_outputs(self._core, unsent, self._emit)

    def _wait(self, seconds: float) -> bool:
        """Process the messages that come within ``seconds``, all that are there with the first; return whether any came."""
        self._send()
        try:
            self._process(self._inbox.get(seconds))
        except Empty:
            return False
        self._process_all()
        return True

    def _wait_idle(self) -> None:
        """Wait for a message until a deadline is due, or else for ``idle_seconds``: then report."""
        until_deadline = self._core.seconds_to_deadline()
        if until_deadline is not None and until_deadline < self._idle_seconds:
            if not self._wait(until_deadline):
                self._core.note_news()
        elif not self._wait(self._idle_seconds):
            self._report()

    def _process_all(self) -> None:
        while self._inbox.num_waiting:
            self._process(self._inbox.get())

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

    def _process(self, item: ToEngine | Literal["wake"] | Exception) -> None:
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
                self._core.note_news()

    def _call(self, call: Call) -> CallResult:
        try:
            return CallResult(call.call_id, self._core.call(call.method, call.args))
        except KvbatonError as error:
            return CallResult(call.call_id, None, error.kind.value, error.message)
        except (AssertionError, TypeError) as error:
            logger.exception("utility %s failed", call.method)
            return CallResult(call.call_id, None, ErrorKind.INTERNAL.value, f"{call.method}: {error!r}")


def send_outputs(core: EngineCore, outputs: dict[int, list[EngineOutput]], emit: Emit) -> None:
    """Emit one message for each client that has outputs."""
    for of_client in outputs.values():
        emit(StepOutputs(of_client, core.scheduler.make_stats()))
