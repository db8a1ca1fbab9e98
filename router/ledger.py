"""The requests that the router holds now, and the account of each when it ends."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from contract.errors import ErrorKind, KvbatonError, OverloadedError
from contract.requests import FinishReason
from router.answer import Delta, Usage
from router.attempt import LegReport
from router.metrics import RouterMetrics
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


class Record:
    """One request's account: state, instants, counts."""

    def __init__(
        self,
        asked: GenerationRequest | EmbeddingRequest,
        metrics: RouterMetrics,
        on_bound: Callable[[], None],
    ) -> None:
        self.state = RequestState.PREPARING
        self.is_background = asked.is_background
        self._request_id = asked.request_id
        self._watch = Stopwatch(asked.arrival)
        self._on_bound = on_bound
        self._metrics = metrics
        self._last_arrival: float | None = None

    def queued(self) -> None:
        """It waits in the line for workers, for the first time or once more."""
        self.state = RequestState.WAITING_FOR_WORKERS

    def bound(self) -> None:
        """Its workers are chosen."""
        has_begun = self._last_arrival is not None
        self.state = RequestState.STREAMING if has_begun else RequestState.WAITING_FOR_FIRST_TOKEN
        self._on_bound()

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
    """Owns the records of all requests that the router holds; at most ``max_queue`` of them wait for workers.

    Requests in the background neither count there nor are refused: whoever sends them bounds them, and waits while
    ``num_unbound`` is above zero.
    """

    def __init__(self, max_queue: int, metrics: RouterMetrics) -> None:
        self._max_queue = max_queue
        self._metrics = metrics
        self._records: set[Record] = set()
        self._on_fewer_unbound: list[Callable[[], None]] = []

    def listen(self, on_fewer_unbound: Callable[[], None]) -> None:
        """Call ``on_fewer_unbound`` whenever ``num_unbound`` may have become smaller, from now on."""
        self._on_fewer_unbound.append(on_fewer_unbound)

    @contextmanager
    def open(self, asked: GenerationRequest | EmbeddingRequest) -> Iterator[Record]:
        """Admit a request for as long as the block lasts, and count how it ends. Raises OverloadedError."""
        if not asked.is_background and self.num_unbound >= self._max_queue:
            self._metrics.failed(ErrorKind.OVERLOADED)
            raise OverloadedError(
                f"{self.num_unbound} requests wait for workers, max_queue is {self._max_queue}; try again later"
            )
        record = Record(asked, self._metrics, self._tell)
        self._records.add(record)
        try:
            yield record
        except BaseException as error:
            if record.state is not RequestState.FINISHED:
                kind = _kind_of(error)
                self._metrics.failed(kind)
                logger.info("%s ended as %s while %s: %s", asked.request_id, kind, record.state, error)
            raise
        finally:
            self._records.remove(record)
            self._tell()

    def num_by_state(self) -> dict[str, int]:
        """How many requests are in each state."""
        counts = Counter(record.state.value for record in self._records)
        return {state.value: counts[state.value] for state in RequestState}

    @property
    def num_running(self) -> int:
        """Requests whose answer is being streamed."""
        return sum(r.state is RequestState.STREAMING for r in self._records)

    @property
    def num_waiting(self) -> int:
        """Requests without a first token yet."""
        return sum(r.state in _EARLY for r in self._records)

    @property
    def num_unbound(self) -> int:
        """Requests that wait for workers, but for those in the background."""
        unbound = (RequestState.PREPARING, RequestState.WAITING_FOR_WORKERS)
        return sum(r.state in unbound and not r.is_background for r in self._records)

    def _tell(self) -> None:
        for on_fewer_unbound in self._on_fewer_unbound:
            on_fewer_unbound()


def _kind_of(error: BaseException) -> ErrorKind:
    if isinstance(error, KvbatonError):
        return error.kind
    went_away = isinstance(error, asyncio.CancelledError | GeneratorExit)
    return ErrorKind.CANCELLED if went_away else ErrorKind.INTERNAL
