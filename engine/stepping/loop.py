"""The loop around an engine core: process messages, start a step when its gate allows it, send the outputs.

The same loop runs in a thread beside its client and in a process of its own; only the other end of the queue and ``emit``
differ.
"""

import logging
from queue import Empty

from contract.outputs import EngineOutput
from engine.core import EngineCore
from engine.hosting.messages import AddRequest, Health, StepOutputs, ToEngine
from engine.hosting.watching import STEP_LOOP
from engine.scheduling.stats import SchedulerStats
from engine.stepping.dispatch import Dispatcher, Emit, Inbox

logger = logging.getLogger(__name__)

SETTLED_SECONDS = 0.5
"""Idle time after which a state is reported that differs from the last report: leases end without a step's outputs."""


class StepLoop:
    """Joins a core with its input and output. ``run`` returns after Shutdown, and raises what a step raises.

    idle_seconds: how long an idle engine waits for input before it reports its health; less if its state has changed.
    """

    def __init__(self, core: EngineCore, inbox: Inbox, emit: Emit, idle_seconds: float) -> None:
        self._core = core
        self._inbox = inbox
        self._emit = emit
        self._idle_seconds = idle_seconds
        self._dispatcher = Dispatcher(core, emit)
        self._num_steps = 0
        self._reported: SchedulerStats | None = None
        self._unsent: dict[int, list[EngineOutput]] = {}
        """Outputs of the last step: sent while the next one is computed, or before the loop waits."""

    def run(self) -> None:
        """Run steps until Shutdown. A step may start before the results of the one before are processed."""
        try:
            while self._core.step_in_flight or self._wait_for_start():
                self._step()
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

    def _step(self) -> None:
        self._unsent = self._core.step(self._send, self._is_quiet)
        self._num_steps += 1

    def _is_quiet(self) -> bool:
        return not self._inbox.num_waiting

    def _send(self) -> None:
        unsent = self._unsent
        self._unsent = {}
        send_outputs(self._core, unsent, self._emit)

    def _process_all(self) -> None:
        """Process all messages that are there. If they leave an urgent output, send everything until now."""
        while self._inbox.num_waiting:
            self._dispatcher.dispatch(self._inbox.get())
        if urgent := self._core.take_urgent():
            self._send()
            send_outputs(self._core, urgent, self._emit)

    def _wait(self, seconds: float) -> bool:
        """Process the messages that come within ``seconds``, all that are there with the first; return whether any came."""
        self._send()
        self._dispatcher.answer_until_free()
        try:
            self._dispatcher.dispatch(self._inbox.get(seconds))
        except Empty:
            return False
        self._process_all()
        return True

    def _wait_idle(self) -> None:
        """Wait for a message, until a deadline is due or the engine has been idle long enough to report its state."""
        until_deadline = self._core.seconds_to_deadline()
        has_changed = self._core.scheduler.load.make_stats() != self._reported
        until_report = min(SETTLED_SECONDS, self._idle_seconds) if has_changed else self._idle_seconds
        if until_deadline is not None and until_deadline < until_report:
            if not self._wait(until_deadline):
                self._core.request_step()
        elif not self._wait(until_report):
            self._report(logging.INFO if until_report == self._idle_seconds else logging.DEBUG)

    def _report(self, level: int) -> None:
        stats = self._core.scheduler.load.make_stats()
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
        self._emit(Health(stats))


def send_outputs(core: EngineCore, outputs: dict[int, list[EngineOutput]], emit: Emit) -> None:
    """Emit one message for each client that has outputs."""
    for of_client in outputs.values():
        emit(StepOutputs(of_client, core.scheduler.load.make_stats()))
