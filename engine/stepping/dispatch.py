"""The effect of each message to an engine."""

import logging
from collections import deque
from collections.abc import Callable
from typing import Literal

from contract.errors import ErrorKind, KvbatonError
from engine.core import EngineCore
from engine.hosting.messages import (
    Abort,
    AbortRequest,
    AddRequest,
    Call,
    CallResult,
    FromEngine,
    Ping,
    Prepare,
    Shutdown,
    ToEngine,
    UntilFree,
)
from engine.mailbox import Mailbox

logger = logging.getLogger(__name__)

WAKE: Literal["wake"] = "wake"
Item = ToEngine | Literal["wake"] | Exception
"""A message, from any thread. WAKE: the connector has events. An exception: the input itself is broken."""
Inbox = Mailbox[Item]
Emit = Callable[[FromEngine], None]


class Dispatcher:
    """Applies messages to a core, between steps.

    is_stopping: Shutdown was received. num_dispatched: counts messages, as a sign of life.
    """

    def __init__(self, core: EngineCore, emit: Emit) -> None:
        self.is_stopping = False
        self.num_dispatched = 0
        self._core = core
        self._emit = emit
        self._waits_until_free: list[int] = []
        self._prepared: deque[int] = deque()
        """Calls whose preparation is over; any thread appends to it, and wakes the loop."""

    def dispatch(self, item: Item) -> None:
        """Apply one message. Raises an exception that is sent as one."""
        self.num_dispatched += 1
        self._answer_prepared()
        match item:
            case AddRequest(request):
                self._core.add_request(request)
            case Abort(keys):
                self._core.abort(keys)
            case AbortRequest(request_id, attempt, choice):
                self._core.abort_request(request_id, attempt, choice)
            case Call() | Prepare():
                self._carry_out(item)
            case UntilFree(call_id):
                self._waits_until_free.append(call_id)
            case Ping():
                pass  # it has been counted
            case Shutdown():
                self.is_stopping = True
            case Exception():
                raise item
            case _:
                self._core.request_step()

    def answer_until_free(self) -> None:
        """Answer every ``UntilFree`` if the core holds nothing for others. To be called when all outputs are sent."""
        if self._waits_until_free and self._core.scheduler.load.is_free():
            waits = self._waits_until_free
            self._waits_until_free = []
            for call_id in waits:
                self._emit(CallResult(call_id))

    def _answer_prepared(self) -> None:
        while self._prepared:
            self._emit(CallResult(self._prepared.popleft()))

    def _carry_out(self, call: Call | Prepare) -> None:
        """Answer a call, at once or when a preparation is over."""
        try:
            if isinstance(call, Prepare):
                self._core.prepare(call.request, lambda: self._prepared.append(call.call_id))
                return
            result = CallResult(call.call_id, self._core.call(call.method, call.args))
        except KvbatonError as error:
            result = CallResult(call.call_id, None, error.kind.value, error.message)
        except (AssertionError, TypeError) as error:
            name = call.method if isinstance(call, Call) else "prepare"
            logger.exception("utility %s failed", name)
            result = CallResult(call.call_id, None, ErrorKind.INTERNAL.value, f"{name}: {error!r}")
        self._emit(result)
