"""The loop around an engine core: process messages, start a step when its gate allows it, send the outputs.

The same loop runs in a thread beside its client and in a process of its own; only the other end of the queue and ``emits``
differ. ``Dispatcher`` has the effect of each message. Further clients (``engine.hosting.sharing``) enter, send and leave by
functions that the loop calls between two steps.
"""

import logging
from collections import deque
from collections.abc import Callable
from queue import Empty
from typing import Literal

from contract.errors import ErrorKind, InvalidRequestError, KvbatonError
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
    Prepare,
    Share,
    Shutdown,
    StepOutputs,
    ToEngine,
    UntilFree,
)
from engine.hosting.watching import STEP_LOOP
from engine.mailbox import Mailbox
from engine.scheduling.stats import SchedulerStats

logger = logging.getLogger(__name__)

WAKE: Literal["wake"] = "wake"
Item = ToEngine | Literal["wake"] | Exception | Callable[[], None]
"""A message, from any thread. WAKE: the connector has events. Exception: the input itself is broken. Functions: see Put."""
Inbox = Mailbox[Item]
Put = Callable[[Callable[[], None]], None]
"""Has the loop call a function between two steps, and wakes it. From any thread."""
Emit = Callable[[FromEngine], None]
Emits = dict[int, Emit]
"""The way to each client, by its index. ``OWNER`` has started the engine, and is the only one that ends it."""
OWNER = 0
Dispatch = Callable[[Item, Emit], None]
ShareEngine = Callable[[EngineCore, Dispatch], str]
"""Returns the address at which further clients attach. Raises KvbatonError if they cannot."""
SETTLED_SECONDS = 0.5
"""Idle time after which a state is reported that differs from the last report: leases end without a step's outputs."""


def refuse_to_share(core: EngineCore, dispatch: Dispatch) -> str:
    """Refuse further clients. Raises InvalidRequestError."""
    raise InvalidRequestError(
        "an engine of a data-parallel group has one client only, which divides the requests among the group"
    )


class Dispatcher:
    """Applies messages to a core, between steps.

    is_stopping: Shutdown was received. num_dispatched: counts messages, as a sign of life.
    """

    def __init__(self, core: EngineCore, share: ShareEngine) -> None:
        self.is_stopping = False
        self.num_dispatched = 0
        self._core = core
        self._share = share
        self._waits_until_free: list[tuple[int, Emit]] = []
        # Calls whose preparation is over; any thread appends to it, and wakes the loop.
        self._prepared: deque[tuple[int, Emit]] = deque()

    def dispatch(self, item: Item, emit: Emit) -> None:
        """Apply one message; its answer, if it has one, is passed to ``emit``. Raises an exception that is sent as one."""
        self.num_dispatched += 1
        while self._prepared:
            call_id, emit_result = self._prepared.popleft()
            emit_result(CallResult(call_id))
        match item:
            case AddRequest(request):
                self._core.add_request(request)
            case Abort(keys):
                self._core.abort(keys)
            case AbortRequest(request_id, attempt, choice):
                self._core.scheduler.abort_request(request_id, attempt, choice)
            case Call() | Prepare() | Share():
                self._carry_out(item, emit)
            case UntilFree(call_id):
                self._waits_until_free.append((call_id, emit))
            case Ping():
                pass  # it has been counted
            case Shutdown():
                self.is_stopping = True
            case Exception():
                raise item
            case _:
                self._core.request_step() if item == WAKE else item()

    def answer_until_free(self) -> None:
        """Answer every ``UntilFree`` if the core holds nothing for others. To be called when all outputs are sent."""
        if self._waits_until_free and self._core.scheduler.is_free():
            waits = self._waits_until_free
            self._waits_until_free = []
            for call_id, emit in waits:
                emit(CallResult(call_id))

    def _carry_out(self, call: Call | Prepare | Share, emit: Emit) -> None:
        """Answer a call, at once or when a preparation is over."""
        try:
            if isinstance(call, Prepare):
                self._core.prepare(call.request, lambda: self._prepared.append((call.call_id, emit)))
                return
            if isinstance(call, Share):
                result = CallResult(call.call_id, self._share(self._core, self.dispatch))
            else:
                result = CallResult(call.call_id, self._core.call(call.method, call.args))
        except KvbatonError as error:
            result = CallResult(call.call_id, None, error.kind.value, error.message)
        # What a caller of a utility gets wrong, or a check of integrity finds, must not end the engine.
        except (AssertionError, TypeError) as error:
            name = call.method if isinstance(call, Call) else type(call).__name__.lower()
            logger.exception("utility %s failed", name)
            result = CallResult(call.call_id, None, ErrorKind.INTERNAL.value, f"{name}: {error!r}")
        emit(result)


class StepLoop:
    """Joins a core with its input and output. ``run`` returns after Shutdown, and raises what a step raises.

    At Shutdown every request is aborted; the loop may go on for a while for engines that step together with this one.

    emits: the clients that ``share`` lets in are added to it, and removed when they leave. idle_seconds: how long an idle
    engine waits for input before it reports its health; less if its state has changed.
    """

    def __init__(
        self,
        core: EngineCore,
        inbox: Inbox,
        emits: Emits,
        idle_seconds: float,
        share: ShareEngine = refuse_to_share,
    ) -> None:
        self._core = core
        self._inbox = inbox
        self._emits = emits
        self._idle_seconds = idle_seconds
        self._dispatcher = Dispatcher(core, share)
        self._num_steps = 0
        self._reported: SchedulerStats | None = None
        # Outputs of the last step: sent while the next one is computed, or before the loop waits.
        self._unsent: dict[int, list[EngineOutput]] = {}

    def run(self) -> None:
        """Run steps until Shutdown. A step may start before the results of the one before are processed."""
        try:
            while self._core.step_in_flight or self._wait_for_start():
                self._unsent = self._core.step(self._send, lambda: not self._inbox.num_waiting)
                self._num_steps += 1
            if not self._core.gate.may_end():
                # Every request is aborted; other engines may still need this one's part in their steps.
                self._send()
                send_outputs(self._core, self._core.scheduler.shutdown(), self._emits)
            while not self._core.gate.may_end():
                if self._core.seconds_to_start() == 0:
                    self._core.step()
                else:
                    self._wait(self._idle_seconds)
        finally:
            self._send()

    def expect(self, message: ToEngine) -> None:
        """Begin with what a message needs that will be put into the inbox: it waits for the end of the running step there.

        From the thread that puts it.
        """
        if isinstance(message, AddRequest):
            self._core.expect_request(message.request)

    def progress(self) -> dict[str, int]:
        """Return how far the loop and the connector's threads have come; from any thread."""
        return {STEP_LOOP: self._num_steps + self._dispatcher.num_dispatched, **self._core.progress()}

    def _wait_for_start(self) -> bool:
        """Process messages until a step may start; return False once the loop is to end."""
        self._process_all()
        while not self._dispatcher.is_stopping:
            delay = self._core.seconds_to_start()
            if delay == 0:
                return True
            if delay is None:
                self._wait_idle()
            elif not self._wait(min(delay, self._idle_seconds)) and delay <= self._idle_seconds:
                return True
        return False

    def _send(self) -> None:
        unsent = self._unsent
        self._unsent = {}  # before it is sent: a failure while sending must not send it twice
        send_outputs(self._core, unsent, self._emits)

    def _process_all(self) -> None:
        """Process all messages that are there. If they leave an urgent output, send everything until now."""
        while self._inbox.num_waiting:
            self._dispatcher.dispatch(self._inbox.get(), self._emits[OWNER])
        if urgent := self._core.flush_urgent():
            self._send()
            send_outputs(self._core, urgent, self._emits)

    def _wait(self, seconds: float) -> bool:
        """Process the messages that come within ``seconds``, all that are there with the first; return whether any came."""
        self._send()
        self._dispatcher.answer_until_free()  # behind the outputs, as it promises
        try:
            self._dispatcher.dispatch(self._inbox.get(seconds), self._emits[OWNER])
        except Empty:
            return False
        self._process_all()
        return True

    def _wait_idle(self) -> None:
        """Wait for a message, until a deadline is due or the engine has been idle long enough to report its state."""
        until_deadline = self._core.seconds_to_deadline()
        has_changed = self._core.scheduler.make_stats() != self._reported
        until_report = min(SETTLED_SECONDS, self._idle_seconds) if has_changed else self._idle_seconds
        if until_deadline is not None and until_deadline < until_report:
            if not self._wait(until_deadline):
                self._core.request_step()  # no event announces that a deadline has passed
        elif not self._wait(until_report):
            self._report(logging.INFO if until_report == self._idle_seconds else logging.DEBUG)

    def _report(self, level: int) -> None:
        stats = self._core.scheduler.make_stats()
        self._reported = stats
        logger.log(
            level,
            "idle: %d running, %d waiting, KV cache %.1f %% used, %d of %d prompt tokens cached",
            stats.num_running_reqs,
            stats.num_waiting_reqs,
            100 * stats.kv_cache_usage,
            stats.prefix_cache_stats.hits,
            stats.prefix_cache_stats.queries,
        )
        send_to_all(Health(stats), self._emits)


def send_outputs(core: EngineCore, outputs: dict[int, list[EngineOutput]], emits: Emits) -> None:
    """Send each client its outputs, if it has any; those of clients that have left are dropped."""
    for index, of_client in outputs.items():
        if index in emits:
            emits[index](StepOutputs(of_client, core.scheduler.make_stats()))


def send_to_all(message: FromEngine, emits: Emits) -> None:
    """Send every client the same message."""
    for emit in list(emits.values()):  # a client that does not read its messages is removed meanwhile
        emit(message)
