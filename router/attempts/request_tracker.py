"""The requests that the router holds now, and what is counted and logged when one of them ends."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from enum import StrEnum

from contract.errors import ErrorKind, InvalidRequestError, KvbatonError
from contract.outputs import FinishReason
from router.admission.admission_queue import Admission
from router.answers.answer import Delta, Usage
from router.answers.timings import Stopwatch
from router.attempts.leg_outcome import LegReport
from router.intake.request import EmbeddingRequest, GenerationRequest
from router.telemetry.metrics import STOPPED, RequestMetrics

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

    holds_slot: it holds a slot of the queue; one in the background holds none. enter: changes its state, and counts that.
    on_end: called once, with the error that has ended the request, if any.
    """

    def __init__(
        self,
        request: GenerationRequest | EmbeddingRequest,
        metrics: RequestMetrics,
        enter: Callable[["TrackedRequest", RequestState], None],
        on_end: Callable[["TrackedRequest", BaseException | None], None],
    ) -> None:
        self.request = request
        self.is_background = request.is_background
        self.state = RequestState.PREPARING
        self.holds_slot = not self.is_background
        self._enter = enter
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

    def on_queued(self) -> None:
        """Record that it waits for workers, for the first time or again."""
        self._stopwatch.on_queued(time.monotonic())
        self._enter(self, RequestState.WAITING_FOR_WORKERS)

    def on_bound(self) -> None:
        """Record that its workers are chosen."""
        self._stopwatch.on_bound(time.monotonic())
        has_begun = self._last_arrival is not None
        self._enter(self, RequestState.STREAMING if has_begun else RequestState.WAITING_FOR_FIRST_TOKEN)

    def on_replayed(self, error: KvbatonError, num_tokens: int) -> None:
        """Record that an attempt has failed, and that another one continues after the delivered tokens."""
        self._metrics.replays.on_replayed(error.kind)
        logger.warning(
            "%s continues at token %d on other workers: %s",
            *(self.request.request_id, num_tokens, error.message),
        )

    def on_recomputed(self, num_tokens: int, local: str | None) -> None:
        """Record that a prompt of so many tokens is computed again, or (``local``) by this decode worker itself."""
        self._metrics.replays.on_recomputed(num_tokens, is_local=local is not None)
        if local is not None:
            logger.warning("%s: decode worker %s computes the prompt itself", self.request.request_id, local)

    def on_delta(self, delta: Delta) -> None:
        """Record that a delta has arrived, before it is sent to the client."""
        now = time.monotonic()
        self._metrics.tokens(len(delta.tokens))
        if not delta.tokens:
            return
        if self._stopwatch.token_1 is None:
            self._stopwatch.on_tokens(delta.tokens[0].index, len(delta.tokens), now)
        if self._last_arrival is None:
            self._metrics.first_token(now - self._stopwatch.arrival)
        else:
            self._metrics.token_gap(now - self._last_arrival)
        self._last_arrival = now
        if self.state is not RequestState.STREAMING:
            self._enter(self, RequestState.STREAMING)

    def finish(self, delta: Delta, reason: FinishReason, usage: Usage, report: LegReport) -> None:
        """Record that the answer is complete, and fill in usage and timings of its last delta."""
        self._stopwatch.engine_queue_seconds = report.queue_seconds
        self._stopwatch.held_seconds = report.held_seconds
        self._stopwatch.prefill_seconds = report.prefill_seconds
        self._stopwatch.transfer = report.transfer
        delta.usage = usage
        delta.timings = self._stopwatch.split(time.monotonic())
        self._metrics.on_success(reason, usage, delta.timings, self.request.tenant)
        self._enter(self, RequestState.FINISHED)


logger = logging.getLogger(__name__)

_EARLY = (
    RequestState.PREPARING,
    RequestState.WAITING_FOR_WORKERS,
    RequestState.WAITING_FOR_FIRST_TOKEN,
)


class RequestTracker:
    """Owns all requests that the router holds. ``max_queue`` of them may wait for workers.

    admission: shares the queue between clients. Requests in the background are neither counted there nor rejected: their
    sender bounds them, and waits while ``num_unbound`` is above zero.
    """

    def __init__(self, max_queue: int, metrics: RequestMetrics) -> None:
        self.admission = Admission(max_queue)
        self._metrics = metrics
        self._counts: Counter[tuple[RequestState, bool]] = Counter()
        self._on_fewer_unbound: list[Callable[[], None]] = []
        self._on_queued: list[Callable[[], None]] = []
        self._num_held = 0
        self._is_ending = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._last_logged: tuple[str, str] | None = None

    def on_fewer_unbound(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever ``num_unbound`` may have become smaller, from now on."""
        self._on_fewer_unbound.append(listener)

    def on_queued(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever a request that is not in the background begins to wait for workers."""
        self._on_queued.append(listener)

    def open(self, request: GenerationRequest | EmbeddingRequest) -> TrackedRequest:
        """Admit a request until its block ends, or until it leaves, and count how it ends.

        Raises OverloadedError, UnavailableError after ``admission.close``.
        """
        self.check_admission(request)
        self._metrics.sizes.admitted(1)
        tracked = TrackedRequest(request, self._metrics, self._enter, self._on_end)
        self._counts[tracked.state, tracked.is_background] += 1
        self.admission.waiting.add(request.tenant, int(tracked.holds_slot))
        self._num_held += not tracked.is_background
        if self._num_held:
            self._idle.clear()
        return tracked

    def _on_end(self, tracked: TrackedRequest, error: BaseException | None) -> None:
        """Remove a request. Count and log it as failed, unless its answer is complete."""
        if tracked.state is not RequestState.FINISHED:
            error = error or GeneratorExit("its reader has left it")
            is_stopped = _went_away(error) and (tracked.is_background or self._is_ending)
            if is_stopped:
                self._metrics.on_stop(is_background=tracked.is_background)
            else:
                self._metrics.on_failure(_kind_of(error))
            kind = STOPPED if is_stopped else _kind_of(error).value
            # once for all prompts of a client's request, which end one after the other
            name = tracked.request.family or tracked.request.request_id
            if self._last_logged != (name, kind):
                self._last_logged = (name, kind)
                logger.info("%s ended as %s while %s: %s", name, kind, tracked.state, _logged(error))
        self._counts[tracked.state, tracked.is_background] -= 1
        if tracked.holds_slot:
            self.admission.waiting.add(tracked.request.tenant, -1)
        self._num_held -= not tracked.is_background
        if not self._num_held:
            self._idle.set()
        _call(self._on_fewer_unbound)

    def end_all(self) -> None:
        """Count the requests whose task is cancelled from now on as stopped: the router ends them, and not their clients."""
        self._is_ending = True

    def check_admission(self, request: GenerationRequest | EmbeddingRequest, num_more: int = 1) -> None:
        """Check that ``num_more`` requests like this one may wait, before the first of them is opened.

        Raises OverloadedError, UnavailableError after ``admission.close``.
        """
        if request.is_background:
            return
        try:
            self.admission.check(request.tenant, num_more)
        except KvbatonError as error:
            self._metrics.on_failure(error.kind)
            raise

    @property
    def is_idle(self) -> bool:
        """True if no request is held, but for those in the background."""
        return self._idle.is_set()

    async def wait_idle(self) -> None:
        """Block until ``is_idle``."""
        await self._idle.wait()

    @property
    def num_held(self) -> int:
        """All requests but those in the background."""
        return self._num_held

    @property
    def num_queued(self) -> int:
        """Requests whose prompt is known and that wait for workers, but for those in the background."""
        return self._counts[RequestState.WAITING_FOR_WORKERS, False]

    @property
    def num_unbound(self) -> int:
        """Requests that are not bound to workers, but for those in the background."""
        return self.admission.waiting.total

    @property
    def num_waiting(self) -> int:
        """Requests without a first token yet."""
        return sum(self._num_in(state) for state in _EARLY)

    @property
    def num_running(self) -> int:
        """Requests whose answer is being streamed."""
        return self._num_in(RequestState.STREAMING)

    def num_by_state(self) -> dict[str, int]:
        """Return how many requests are in each state."""
        return {state.value: self._num_in(state) for state in RequestState}

    def _num_in(self, state: RequestState) -> int:
        return self._counts[state, True] + self._counts[state, False]

    def _enter(self, tracked: TrackedRequest, state: RequestState) -> None:
        """Change the state of a request, and count it there. Does nothing if it has this state already."""
        before = tracked.state
        if state is before:
            return
        held_slot = tracked.holds_slot
        tracked.state = state
        tracked.holds_slot = state in _UNBOUND and not tracked.is_background
        self._counts[before, tracked.is_background] -= 1
        self._counts[state, tracked.is_background] += 1
        if held_slot != tracked.holds_slot:
            self.admission.waiting.add(tracked.request.tenant, tracked.holds_slot - held_slot)
        if held_slot and not tracked.holds_slot:
            _call(self._on_fewer_unbound)
        if state is RequestState.WAITING_FOR_WORKERS and not tracked.is_background:
            _call(self._on_queued)


def _call(listeners: list[Callable[[], None]]) -> None:
    for listener in listeners:
        listener()


def _kind_of(error: BaseException) -> ErrorKind:
    if isinstance(error, KvbatonError):
        return error.kind
    return ErrorKind.CANCELLED if _went_away(error) else ErrorKind.INTERNAL


def _went_away(error: BaseException) -> bool:
    """Return True for the end of a task from outside, most often because its client has disconnected."""
    return isinstance(error, asyncio.CancelledError | GeneratorExit | ConnectionResetError)


def _logged(error: BaseException) -> object:
    """Return what is logged of an error: of an invalid request only the field, since the message quotes the client."""
    if isinstance(error, InvalidRequestError):
        return f"{error.param or 'the request'} is refused"
    return error
