"""The requests that the router holds now, and what is counted and logged when one of them ends."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

from contract.errors import ErrorKind, InvalidRequestError, KvbatonError
from router.admission.admission import Admission
from router.attempts.tracked_request import RequestState, TrackedRequest
from router.intake.request import EmbeddingRequest, GenerationRequest
from router.telemetry.metrics import STOPPED, RequestMetrics

logger = logging.getLogger(__name__)

_EARLY = (
    RequestState.PREPARING,
    RequestState.WAITING_FOR_WORKERS,
    RequestState.WAITING_FOR_FIRST_TOKEN,
)


class RequestTracker:
    """Owns all requests that the router holds. ``max_queue`` of them may wait for workers.

    ``Admission`` shares the queue between clients. Requests in the background are neither counted there nor rejected: their
    sender bounds them, and waits while ``num_unbound`` is above zero.
    """

    def __init__(self, max_queue: int, metrics: RequestMetrics) -> None:
        self._admission = Admission(max_queue)
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

        Raises OverloadedError, UnavailableError after ``close_admission``.
        """
        self.check_admission(request)
        self._metrics.sizes.admitted(1)
        tracked = TrackedRequest(request, self._metrics, self._on_state, self._on_end)
        self._add(tracked)
        return tracked

    def _on_end(self, tracked: TrackedRequest, error: BaseException | None) -> None:
        """Remove a request. Count and log it as failed, unless its answer is complete."""
        if tracked.state is not RequestState.FINISHED:
            error = error or GeneratorExit("its reader has left it")
            is_stopped = _went_away(error) and (tracked.is_background or self._is_ending)
            if is_stopped:
                self._metrics.stopped(is_background=tracked.is_background)
            else:
                self._metrics.failed(_kind_of(error))
            kind = STOPPED if is_stopped else _kind_of(error).value
            self._log_end(tracked.request.family or tracked.request.request_id, kind, tracked.state, error)
        self._remove(tracked)
        _call(self._on_fewer_unbound)

    def end_all(self) -> None:
        """Count the requests whose task is cancelled from now on as stopped: the router ends them, and not their clients."""
        self._is_ending = True

    def close_admission(self, reason: str) -> None:
        """Reject every request from now on, but for those in the background."""
        self._admission.close(reason)

    @property
    def is_closed(self) -> bool:
        """True after ``close_admission``."""
        return self._admission.is_closed

    def check_admission(self, request: GenerationRequest | EmbeddingRequest, num_more: int = 1) -> None:
        """Check that ``num_more`` requests like this one may wait, before the first of them is opened.

        Raises OverloadedError, UnavailableError after ``close_admission``.
        """
        if request.is_background:
            return
        try:
            self._admission.check(request.tenant, num_more)
        except KvbatonError as error:
            self._metrics.failed(error.kind)
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
        return self._admission.num_waiting

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

    def _add(self, tracked: TrackedRequest) -> None:
        self._counts[tracked.state, tracked.is_background] += 1
        self._admission.count(tracked.request.tenant, int(tracked.holds_slot))
        self._num_held += not tracked.is_background
        if self._num_held:
            self._idle.clear()

    def _remove(self, tracked: TrackedRequest) -> None:
        self._counts[tracked.state, tracked.is_background] -= 1
        if tracked.holds_slot:
            self._admission.count(tracked.request.tenant, -1)
        self._num_held -= not tracked.is_background
        if not self._num_held:
            self._idle.set()

    def _on_state(self, tracked: TrackedRequest, before: RequestState, held_slot: bool) -> None:
        """Count a request whose state has changed from ``before``."""
        self._counts[before, tracked.is_background] -= 1
        self._counts[tracked.state, tracked.is_background] += 1
        if held_slot != tracked.holds_slot:
            self._admission.count(tracked.request.tenant, tracked.holds_slot - held_slot)
        if held_slot and not tracked.holds_slot:
            _call(self._on_fewer_unbound)
        if tracked.state is RequestState.WAITING_FOR_WORKERS and not tracked.is_background:
            _call(self._on_queued)

    def _log_end(self, name: str, kind: str, state: RequestState, error: BaseException) -> None:
        """Log how a request ended: once for all prompts of a client's request, which end one after the other."""
        if self._last_logged != (name, kind):
            self._last_logged = (name, kind)
            logger.info("%s ended as %s while %s: %s", name, kind, state, _logged(error))


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
