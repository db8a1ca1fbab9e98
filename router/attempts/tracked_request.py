"""The state and the times of one request, for counts, metrics and its timings."""

import logging
import time
from collections.abc import Callable
from enum import StrEnum

from contract.errors import KvbatonError
from contract.outputs import FinishReason
from router.answers.answer import Delta, Usage
from router.answers.timings import Stopwatch
from router.attempts.leg_outcome import LegReport
from router.intake.request import EmbeddingRequest, GenerationRequest
from router.telemetry.metrics import RequestMetrics

logger = logging.getLogger(__name__)


class RequestState(StrEnum):
    """The stage of a request."""

    PREPARING = "preparing"
    WAITING_FOR_WORKERS = "waiting_for_workers"
    WAITING_FOR_FIRST_TOKEN = "waiting_for_first_token"
    STREAMING = "streaming"
    FINISHED = "finished"


_UNBOUND = (RequestState.PREPARING, RequestState.WAITING_FOR_WORKERS)


class TrackedRequest:
    """The state, times and counts of one request, until its block or ``leave`` ends it. Made by ``RequestTracker.open``.

    holds_slot: it holds a slot of the queue; one in the background holds none. on_state: called when the state has changed,
    with the state before and whether the request held a slot then. on_end: called once, with the error that has ended the
    request, if any.
    """

    def __init__(
        self,
        request: GenerationRequest | EmbeddingRequest,
        metrics: RequestMetrics,
        on_state: Callable[["TrackedRequest", RequestState, bool], None],
        on_end: Callable[["TrackedRequest", BaseException | None], None],
    ) -> None:
        self.request = request
        self.is_background = request.is_background
        self.state = RequestState.PREPARING
        self.holds_slot = not self.is_background
        self._on_state = on_state
        self._on_end = on_end
        self._stopwatch = Stopwatch(request.arrival)
        self._metrics = metrics
        self._last_arrival: float | None = None

    def __enter__(self) -> "TrackedRequest":
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        self.leave(error)

    def leave(self, error: BaseException | None) -> None:
        """Record that the router holds the request no longer. error: the one that has ended it, if any."""
        self._on_end(self, error)

    def queued(self) -> None:
        """Record that it waits for workers, for the first time or again."""
        self._stopwatch.queued(time.monotonic())
        self._enter(RequestState.WAITING_FOR_WORKERS)

    def bound(self) -> None:
        """Record that its workers are chosen."""
        self._stopwatch.bound(time.monotonic())
        has_begun = self._last_arrival is not None
        self._enter(RequestState.STREAMING if has_begun else RequestState.WAITING_FOR_FIRST_TOKEN)

    def replayed(self, error: KvbatonError, num_tokens: int) -> None:
        """Record that an attempt has failed, and that another one continues after the delivered tokens."""
        self._metrics.replays.replayed(error.kind)
        logger.warning(
            "%s continues at token %d on other workers: %s",
            *(self.request.request_id, num_tokens, error.message),
        )

    def recomputed(self, num_tokens: int, local: str | None) -> None:
        """Record that a prompt of so many tokens is computed again, or (``local``) by this decode worker itself."""
        self._metrics.replays.recomputed(num_tokens, is_local=local is not None)
        if local is not None:
            logger.warning("%s: decode worker %s computes the prompt itself", self.request.request_id, local)

    def arrived(self, delta: Delta) -> None:
        """Record that a delta has arrived, before it is sent to the client."""
        now = time.monotonic()
        self._metrics.tokens(len(delta.tokens))
        if not delta.tokens:
            return
        if self._stopwatch.token_1 is None:
            self._stopwatch.tokens(delta.tokens[0].index, len(delta.tokens), now)
        if self._last_arrival is None:
            self._metrics.first_token(now - self._stopwatch.arrival)
        else:
            self._metrics.token_gap(now - self._last_arrival)
        self._last_arrival = now
        if self.state is not RequestState.STREAMING:
            self._enter(RequestState.STREAMING)

    def finish(self, delta: Delta, reason: FinishReason, usage: Usage, report: LegReport) -> None:
        """Record that the answer is complete, and fill in usage and timings of its last delta."""
        self._stopwatch.engine_queue_seconds = report.queue_seconds
        self._stopwatch.held_seconds = report.held_seconds
        self._stopwatch.prefill_seconds = report.prefill_seconds
        self._stopwatch.transfer = report.transfer
        delta.usage = usage
        delta.timings = self._stopwatch.split(time.monotonic())
        self._metrics.succeeded(reason, usage, delta.timings, self.request.tenant)
        self._enter(RequestState.FINISHED)

    def _enter(self, state: RequestState) -> None:
        if state is self.state:
            return
        before = self.state
        held_slot = self.holds_slot
        self.state = state
        self.holds_slot = state in _UNBOUND and not self.is_background
        self._on_state(self, before, held_slot)
