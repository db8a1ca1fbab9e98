"""One request over as many attempts as it takes: a worker's death is not the request's (law 5).

An attempt that fails is closed, which cancels what is left of it, and the next one begins where it stopped: with the
prompt and the tokens that were delivered, on other workers where there are any. It waits for them in the same line as
everybody, at the place that its arrival gives it. Tokens of older attempts that still come are dropped.
"""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from contract.errors import DeadlineError, ErrorKind, KvbatonError, UnavailableError
from contract.identity import Role
from router.attempt import Arrival, Attempt, LegReport
from router.ledger import Record
from router.policy import Placement, Wish
from router.registry import AttachedWorker, Registry
from router.request import PreparedRequest
from router.tasks import TaskSet
from router.waiting_line import WaitingLine

logger = logging.getLogger(__name__)

_CURABLE = (
    ErrorKind.WORKER_LOST,
    ErrorKind.UNAVAILABLE,
    ErrorKind.OVERLOADED,
    ErrorKind.TRANSFER_FAILED,
    ErrorKind.PEER_UNREACHABLE,
    ErrorKind.INCOMPATIBLE,
    ErrorKind.DEADLINE,
)
"""Kinds of a worker's error that other workers may not have. The request's own deadline is checked apart."""
_TRANSFER_KINDS = (ErrorKind.TRANSFER_FAILED, ErrorKind.PEER_UNREACHABLE, ErrorKind.INCOMPATIBLE)
_MAX_TRANSFER_FAILURES = 2


@dataclass(frozen=True)
class Relays:
    """What every relay runs on.

    max_replays: attempts in a row that may fail without a token of a decode leg (those of prefill legs prove nothing
    about the hand-over). max_unread_bytes: of an answer that waits in the router because its client does not read.
    """

    registry: Registry
    line: WaitingLine
    tasks: TaskSet
    max_replays: int
    max_unread_bytes: int

    @contextmanager
    def open(self, request: PreparedRequest, records: Sequence[Record]) -> "Iterator[list[Relay]]":
        """A relay for each answer to this prompt, one a record, for as long as the block lasts.

        The workers that begin them compute the prompt once and hand it over once.
        """
        first, *others = [
            Relay(self, request.of_choice(choice), record) for choice, record in enumerate(records)
        ]
        first.lead(others)
        try:
            yield [first, *others]
        finally:
            for relay in (first, *others):
                relay.close()


class Relay:
    """Owns one answer's attempts, one at a time, and the tokens that were delivered."""

    def __init__(self, parts: Relays, request: PreparedRequest, record: Record) -> None:
        self._parts, self.request, self.record = parts, request, record
        self._delivered: list[int] = []
        self._attempt: Attempt | None = None
        self._num_attempts = 0
        self._num_failures = 0
        self._num_transfer_failures = 0
        self._suspects: set[AttachedWorker] = set()
        self._prefer: str | None = None
        self._failure: KvbatonError | None = None
        self._followers: list[Relay] = []
        self._begun: asyncio.Event | None = None
        self.report = LegReport()

    def lead(self, followers: "list[Relay]") -> None:
        """Begin their first attempts together with this one's: their requests are further choices of the same prompt."""
        self._followers = followers
        for follower in followers:
            follower._begun = asyncio.Event()

    def close(self) -> None:
        """End the attempt that runs. Does nothing the second time."""
        attempt, self._attempt = self._attempt, None
        if attempt:
            attempt.close()

    async def next(self) -> Arrival:
        """The next tokens, from whichever attempt. Raises the error that no further attempt can mend."""
        try:
            async with asyncio.timeout(max(0.0, self.request.deadline - time.monotonic())):
                arrival = await self._next()
        except TimeoutError:
            raise DeadlineError(
                f"the request ran into its deadline with {len(self._delivered)} tokens delivered"
            ) from None
        self._delivered += [token.token_id for token in arrival.tokens]
        if self._attempt and self._attempt.is_decoding:
            self._num_failures = self._num_transfer_failures = 0
        return arrival

    async def _next(self) -> Arrival:
        while True:
            attempt = self._attempt or await self._bind()
            self._attempt = attempt
            try:
                return await attempt.next()
            except KvbatonError as error:
                self._survive(attempt, error)

    async def _bind(self) -> Attempt:
        if self._begun and not self._begun.is_set():
            self.record.queued()
            await self._begun.wait()
            self.record.bound()
            if self._attempt:
                return self._attempt
        request = self.request
        wish = Wish(
            num_prompt_tokens=len(request.prompt_token_ids) + len(self._delivered),
            num_answer_tokens=request.num_answer_tokens * (1 + len(self._followers)),
            prefer=self._prefer,
            avoid=frozenset(worker.name for worker in self._suspects if not worker.gone.is_set()),
            is_replay=self._num_attempts > 0,
            is_local=self._num_transfer_failures >= _MAX_TRANSFER_FAILURES,
            is_embedding=request.is_embedding,
        )
        self.record.queued()
        try:
            attempt = await self._parts.line.bind(wish, request.priority, request.arrival, self._begin)
        except UnavailableError as error:
            if self._failure is None:
                raise
            raise type(self._failure)(f"{self._failure.message}; then {error.message}") from error
        self.record.bound()
        return attempt

    def _begin(self, placement: Placement) -> Attempt:
        followers, self._followers = self._followers, []
        others = [follower._begin_behind(placement) for follower in followers]
        return self._new_attempt(placement).begin(*others)

    def _begin_behind(self, placement: Placement) -> Attempt:
        self._attempt = self._new_attempt(placement)
        if self._begun:
            self._begun.set()
        return self._attempt

    def _new_attempt(self, placement: Placement) -> Attempt:
        get = self._parts.registry.get
        number, self._num_attempts = self._num_attempts, self._num_attempts + 1
        if placement.prefill is None and get(placement.decode).role is Role.DECODE:
            self.record.recomputed_locally(placement.decode)
        return Attempt(
            self.request,
            self._delivered,
            number,
            get(placement.prefill) if placement.prefill else None,
            get(placement.decode),
            self._parts.tasks,
            self.report,
            self._parts.max_unread_bytes,
        )

    def _survive(self, attempt: Attempt, error: KvbatonError) -> None:
        """Close a failed attempt. Raises its error where another one could not help, or too many have failed."""
        self.close()
        if not self._is_known_death(attempt):
            self._num_failures += 1
            self._num_transfer_failures += error.kind in _TRANSFER_KINDS
        if error.kind not in _CURABLE or self._num_failures > self._parts.max_replays:
            raise error
        self._failure = error
        self._suspects |= attempt.suspects
        self._prefer = attempt.prefill_worker
        self.record.replayed(error, len(self._delivered))

    def _is_known_death(self, attempt: Attempt) -> bool:
        """One death costs one attempt: a peer may tell of it before its stream does, and a replay be bound there again.

        A worker that is gone takes no further attempt, so this excuses each at most once.
        """
        known = [worker.gone.is_set() and worker in self._suspects for worker in attempt.suspects]
        return bool(known) and all(known)
