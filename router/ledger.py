"""The requests that the router holds now, and the account of each when it ends."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from contract.errors import (
    ErrorKind,
    InvalidRequestError,
    KvbatonError,
    OverloadedError,
    UnavailableError,
)
from contract.requests import FinishReason
from router.admission import has_slot
from router.answer import Delta, Usage
from router.leg_report import LegReport
from router.metrics import RequestMetrics
from router.request import EmbeddingRequest, GenerationRequest
from router.timings import Stopwatch

logger = logging.getLogger(__name__)


class RequestState(StrEnum):
    """How far a request is."""

    PREPARING = "preparing"
    WAITING_FOR_WORKERS = "waiting_for_workers"
    WAITING_FOR_FIRST_TOKEN = "waiting_for_first_token"
    STREAMING = "streaming"
    FINISHED = "finished"


_EARLY = (
    RequestState.PREPARING,
    RequestState.WAITING_FOR_WORKERS,
    RequestState.WAITING_FOR_FIRST_TOKEN,
)


_UNBOUND = (RequestState.PREPARING, RequestState.WAITING_FOR_WORKERS)


class Record:
    """One request's account: state, instants, counts."""

    def __init__(
        self,
        asked: GenerationRequest | EmbeddingRequest,
        metrics: RequestMetrics,
        on_state: Callable[["Record", RequestState], None],
    ) -> None:
        self._state = RequestState.PREPARING
        self._on_state = on_state
        self.is_background = asked.is_background
        self.tenant = asked.tenant
        self._request_id = asked.request_id
        self._watch = Stopwatch(asked.arrival)
        self._metrics = metrics
        self._last_arrival: float | None = None

    @property
    def state(self) -> RequestState:
        """How far it is."""
        return self._state

    @state.setter
    def state(self, state: RequestState) -> None:
        before = self._state
        self._state = state
        if before is not state:
            self._on_state(self, before)

    @property
    def is_unbound(self) -> bool:
        """Whether it holds a slot of the queue: in the background it holds none."""
        return self._state in _UNBOUND and not self.is_background

    def queued(self) -> None:
        """It waits in the line for workers, for the first time or once more."""
        self.state = RequestState.WAITING_FOR_WORKERS

    def bound(self) -> None:
        """Its workers are chosen."""
        has_begun = self._last_arrival is not None
        self.state = RequestState.STREAMING if has_begun else RequestState.WAITING_FOR_FIRST_TOKEN

    def replayed(self, error: KvbatonError, num_tokens: int) -> None:
        """An attempt has failed; the request goes on behind the tokens that were delivered."""
        self._metrics.replayed(error.kind)
        logger.warning(
            "%s goes on from token %d with other workers: %s", self._request_id, num_tokens, error.message
        )

    def recomputed_locally(self, worker: str) -> None:
        """A replay has its prompt computed by a decode worker."""
        self._metrics.recomputed_locally()
        logger.warning("%s: decode worker %s computes the prompt itself", self._request_id, worker)

    def arrived(self, delta: Delta) -> None:
        """A delta has come; call before it goes to the client."""
        now = time.monotonic()
        self._metrics.tokens(len(delta.tokens))
        if not delta.tokens:
            return
        self._watch.tokens(delta.tokens[0].index, len(delta.tokens), now)
        if self._last_arrival is None:
            self._metrics.first_token(now - self._watch.arrival)
        else:
            self._metrics.token_gap(now - self._last_arrival)
        self._last_arrival = now
        self.state = RequestState.STREAMING

    def finish(self, delta: Delta, reason: FinishReason, usage: Usage, report: LegReport) -> None:
        """The answer is whole: fill in the last delta's usage and timings."""
        self._watch.prefill_seconds = report.prefill_seconds
        self._watch.transfer = report.transfer
        delta.usage, delta.timings = usage, self._watch.split(time.monotonic())
        self._metrics.succeeded(reason, usage, delta.timings)
        self.state = RequestState.FINISHED


class Ledger:
    """Owns the records of all requests that the router holds; ``max_queue`` of them wait for workers.

    ``admission.has_slot`` shares the queue between clients. Requests in the background neither count there nor are refused:
    whoever sends them bounds them, and waits while ``num_unbound`` is above zero.
    """

    def __init__(self, max_queue: int, metrics: RequestMetrics) -> None:
        self._max_queue = max_queue
        self._metrics = metrics
        self._records: set[Record] = set()
        self._num_by_state: Counter[RequestState] = Counter()
        self._unbound: Counter[str] = Counter()
        self._on_fewer_unbound: list[Callable[[], None]] = []
        self._on_queued: list[Callable[[], None]] = []
        self._refusal: str | None = None
        self._num_held = 0
        self._last_logged: tuple[str, ErrorKind] | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    def listen(self, on_fewer_unbound: Callable[[], None]) -> None:
        """Call ``on_fewer_unbound`` whenever ``num_unbound`` may have become smaller, from now on."""
        self._on_fewer_unbound.append(on_fewer_unbound)

    def listen_queued(self, on_queued: Callable[[], None]) -> None:
        """Call ``on_queued`` whenever a request that is not in the background begins to wait for workers."""
        self._on_queued.append(on_queued)

    @property
    def num_queued(self) -> int:
        """Requests whose prompt is known and that wait for workers, but for those in the background."""
        waiting = RequestState.WAITING_FOR_WORKERS
        return sum(record.state is waiting and not record.is_background for record in self._records)

    @contextmanager
    def open(self, asked: GenerationRequest | EmbeddingRequest) -> Iterator[Record]:
        """Admit a request for as long as the block lasts, and count how it ends.

        Raises OverloadedError, UnavailableError after ``close_admission``.
        """
        self.check_admission(asked)
        record = Record(asked, self._metrics, self._moved)
        self._add(record)
        try:
            yield record
        except BaseException as error:
            if record.state is not RequestState.FINISHED:
                kind = _kind_of(error)
                self._metrics.failed(kind)
                self._log_end(asked.family or asked.request_id, kind, record.state, error)
            raise
        finally:
            self._remove(record)
            self._tell()

    def close_admission(self, reason: str) -> None:
        """Refuse every request from now on, but for those in the background."""
        self._refusal = reason

    @property
    def is_closed(self) -> bool:
        """True after ``close_admission``."""
        return self._refusal is not None

    @property
    def num_held(self) -> int:
        """All requests but those in the background."""
        return self._num_held

    @property
    def is_idle(self) -> bool:
        """True when no request is held, but for those in the background."""
        return self._idle.is_set()

    async def wait_idle(self) -> None:
        """Block until ``is_idle``."""
        await self._idle.wait()

    def check_admission(self, asked: GenerationRequest | EmbeddingRequest, num_more: int = 1) -> None:
        """Refuse ``num_more`` requests like this one, where they may not wait: all before one of them is opened.

        Raises OverloadedError, UnavailableError after ``close_admission``.
        """
        tenant = asked.tenant
        if asked.is_background:
            return
        if self._refusal is not None:
            self._metrics.failed(ErrorKind.UNAVAILABLE)
            raise UnavailableError(self._refusal)
        if not has_slot(self._unbound, tenant, self._max_queue, num_more):
            self._metrics.failed(ErrorKind.OVERLOADED)
            raise OverloadedError(
                f"{self.num_unbound} requests wait for workers ({self._unbound[tenant]} of this client), this one makes "
                f"{num_more} more, and max_queue is {self._max_queue}; try again later"
            )

    def _log_end(self, name: str, kind: ErrorKind, state: RequestState, error: BaseException) -> None:
        """Log how a request ended: once for all prompts of one, which end one behind the other."""
        if self._last_logged != (name, kind):
            self._last_logged = (name, kind)
            logger.info("%s ended as %s while %s: %s", name, kind, state, _told(error))

    def _add(self, record: Record) -> None:
        self._records.add(record)
        self._num_by_state[record.state] += 1
        self._count_unbound(record.tenant, int(record.is_unbound))
        self._num_held += not record.is_background
        if self._num_held:
            self._idle.clear()

    def _remove(self, record: Record) -> None:
        self._records.remove(record)
        self._num_by_state[record.state] -= 1
        self._count_unbound(record.tenant, -int(record.is_unbound))
        self._num_held -= not record.is_background
        if not self._num_held:
            self._idle.set()

    def _moved(self, record: Record, before: RequestState) -> None:
        self._num_by_state[before] -= 1
        self._num_by_state[record.state] += 1
        was_unbound = before in _UNBOUND and not record.is_background
        self._count_unbound(record.tenant, record.is_unbound - was_unbound)
        if was_unbound and not record.is_unbound:
            self._tell()
        if record.state is RequestState.WAITING_FOR_WORKERS and not record.is_background:
            for on_queued in self._on_queued:
                on_queued()

    def _count_unbound(self, tenant: str, difference: int) -> None:
        self._unbound[tenant] += difference
        if not self._unbound[tenant]:
            del self._unbound[tenant]

    def num_by_state(self) -> dict[str, int]:
        """How many requests are in each state."""
        return {state.value: self._num_by_state[state] for state in RequestState}

    @property
    def num_running(self) -> int:
        """Requests whose answer is being streamed."""
        return self._num_by_state[RequestState.STREAMING]

    @property
    def num_waiting(self) -> int:
        """Requests without a first token yet."""
        return sum(self._num_by_state[state] for state in _EARLY)

    @property
    def num_unbound(self) -> int:
        """Requests that wait for workers, but for those in the background."""
        return self._unbound.total()

    def _tell(self) -> None:
        for on_fewer_unbound in self._on_fewer_unbound:
            on_fewer_unbound()


def _kind_of(error: BaseException) -> ErrorKind:
    if isinstance(error, KvbatonError):
        return error.kind
    went_away = isinstance(error, asyncio.CancelledError | GeneratorExit)
    return ErrorKind.CANCELLED if went_away else ErrorKind.INTERNAL


def _told(error: BaseException) -> object:
    """What the log says of an error: of a wrong request its field alone, since the message quotes the client."""
    if isinstance(error, InvalidRequestError):
        return f"{error.param or 'the request'} is refused"
    return error
