"""The requests that the router holds now, and the account of each when it ends."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

from contract.errors import ErrorKind, KvbatonError, OverloadedError
from contract.requests import FinishReason
from router.answer import Delta, Usage
from router.attempt import LegReport
from router.metrics import RouterMetrics
from router.request import GenerationRequest
from router.timings import Stopwatch

logger = logging.getLogger(__name__)


class RequestState(StrEnum):
    """How far a request is."""

    PREPARING = "preparing"
    WAITING_FOR_FIRST_TOKEN = "waiting_for_first_token"
    STREAMING = "streaming"
    FINISHED = "finished"


class Record:
    """One request's account: state, instants, counts."""

    def __init__(self, arrival: float, metrics: RouterMetrics) -> None:
        self.state = RequestState.PREPARING
        self._watch = Stopwatch(arrival)
        self._metrics = metrics
        self._last_arrival: float | None = None

    def bound(self) -> None:
        """Its workers are chosen."""
        self.state = RequestState.WAITING_FOR_FIRST_TOKEN

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
        self._watch.exposed_seconds = report.exposed_seconds
        self._watch.hidden_seconds = report.hidden_seconds
        delta.usage, delta.timings = usage, self._watch.split(time.monotonic())
        self._metrics.succeeded(reason, usage, delta.timings)
        self.state = RequestState.FINISHED


class Ledger:
    """Owns the records of all requests that the router holds, at most ``max_requests``."""

    def __init__(self, max_requests: int, metrics: RouterMetrics) -> None:
        self._max_requests = max_requests
        self._metrics = metrics
        self._records: dict[str, Record] = {}

    @contextmanager
    def open(self, asked: GenerationRequest) -> Iterator[Record]:
        """Admit a request for as long as the block lasts, and count how it ends. Raises OverloadedError."""
        if len(self._records) >= self._max_requests:
            self._metrics.failed(ErrorKind.OVERLOADED)
            raise OverloadedError(
                f"the router holds {len(self._records)} requests, its limit; try again later"
            )
        record = self._records[asked.request_id] = Record(asked.arrival, self._metrics)
        try:
            yield record
        except BaseException as error:
            if record.state is not RequestState.FINISHED:
                kind = _kind_of(error)
                self._metrics.failed(kind)
                logger.info("%s ended as %s while %s: %s", asked.request_id, kind, record.state, error)
            raise
        finally:
            del self._records[asked.request_id]

    def num_by_state(self) -> dict[str, int]:
        """How many requests are in each state."""
        counts = Counter(record.state.value for record in self._records.values())
        return {state.value: counts[state.value] for state in RequestState}

    @property
    def num_running(self) -> int:
        """Requests whose answer is being streamed."""
        return sum(r.state is RequestState.STREAMING for r in self._records.values())

    @property
    def num_waiting(self) -> int:
        """Requests without a first token yet."""
        early = (RequestState.PREPARING, RequestState.WAITING_FOR_FIRST_TOKEN)
        return sum(r.state in early for r in self._records.values())


def _kind_of(error: BaseException) -> ErrorKind:
    if isinstance(error, KvbatonError):
        return error.kind
    went_away = isinstance(error, asyncio.CancelledError | GeneratorExit)
    return ErrorKind.CANCELLED if went_away else ErrorKind.INTERNAL
