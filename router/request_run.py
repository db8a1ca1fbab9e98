"""One request over as many attempts as it takes: a worker's death is not the request's (law 5).

An attempt that fails is closed, which cancels what is left of it, and the next one begins where it stopped: with the
prompt and the tokens that were delivered, on other workers where there are any (``failures`` decides). It waits for them
in front of the requests of its priority that were not begun yet. Tokens of older attempts that still come are dropped.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from contract.errors import DeadlineError, ErrorKind, KvbatonError, UnavailableError
from contract.identity import Role
from router.admission_queue import AdmissionQueue
from router.attempt import Attempt
from router.bound_leg import legs_of
from router.delivery import TokenBatch
from router.failures import Failures
from router.fair_queue import QueueOrder
from router.inbox import UnreadAccount, UnreadBytes
from router.leg_report import LegReport
from router.legs import LEG_KINDS, LegKind, Placement
from router.policy import PlacementRequest
from router.registry import Registry
from router.request import PreparedRequest
from router.request_tracker import TrackedRequest
from router.tasks import TaskSet
from router.unreachable_pairs import UnreachablePairs


@dataclass(frozen=True)
class RequestRuns:
    """What every relay runs on.

    max_replays: attempts in a row that may fail without a token of a decode leg (those of prefill legs prove nothing
    about the hand-over). unread: bounds what waits in the router because clients do not read. kinds: the kinds of leg that
    placements name.
    """

    registry: Registry
    line: AdmissionQueue
    severed: UnreachablePairs
    tasks: TaskSet
    unread: UnreadBytes
    max_replays: int
    kinds: Mapping[str, LegKind] = field(default_factory=lambda: LEG_KINDS)

    @contextmanager
    def open(
        self, request: PreparedRequest, records: Sequence[TrackedRequest], unread: UnreadAccount
    ) -> "Iterator[list[RequestRun]]":
        """A relay for each answer to this prompt, one a record, for as long as the block lasts.

        The workers that begin them compute the prompt once and hand it over once. unread: the account of the client's
        request that the prompt is a part of.
        """
        first, *others = [
            RequestRun(self, request.of_choice(choice), record, unread)
            for choice, record in enumerate(records)
        ]
        first.lead(others)
        try:
            yield [first, *others]
        finally:
            for relay in (first, *others):
                relay.close()


class RequestRun:
    """Owns one answer's attempts, one at a time, and the tokens that were delivered."""

    def __init__(
        self, parts: RequestRuns, request: PreparedRequest, record: TrackedRequest, unread: UnreadAccount
    ) -> None:
        self._parts = parts
        self.request = request
        self.record = record
        self._unread = unread
        self._delivered: list[int] = []
        self._attempt: Attempt | None = None
        self._num_attempts = 0
        self._failures = Failures(parts.severed, parts.max_replays)
        self._followers: list[RequestRun] = []
        self._begun: asyncio.Event | None = None
        self.report = LegReport()

    def lead(self, followers: "list[RequestRun]") -> None:
        """Begin their first attempts together with this one's: their requests are further choices of the same prompt."""
        self._followers = followers
        for follower in followers:
            follower.follow()

    def follow(self) -> None:
        """Have another relay begin the first attempt, by ``begin_behind``."""
        self._begun = asyncio.Event()

    def begin_behind(self, placement: Placement) -> Attempt:
        """Return the first attempt for the relay that begins it."""
        self._attempt = self._new_attempt(placement)
        self.record.bound()
        if self._begun:
            self._begun.set()
        return self._attempt

    def close(self) -> None:
        """End the attempt that runs. Does nothing the second time."""
        attempt = self._attempt
        self._attempt = None
        if attempt:
            attempt.close()

    async def next(self) -> TokenBatch:
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
            self._failures.progress(self._attempt)
        return arrival

    async def _next(self) -> TokenBatch:
        while True:
            attempt = self._attempt or await self._bind()
            self._attempt = attempt
            try:
                return await attempt.next()
            except KvbatonError as error:
                self.close()
                self._failures.note(attempt, error)
                self.record.replayed(error, len(self._delivered))

    async def _bind(self) -> Attempt:
        if self._begun and not self._begun.is_set():
            self.record.queued()
            await self._begun.wait()
            self.record.bound()
            if self._attempt:
                return self._attempt
        if pause := self._failures.pause_seconds:
            await asyncio.sleep(pause)
        self.record.queued()
        wish = self._wish()
        try:
            attempt = await self._parts.line.bind(wish, self._claim(wish), self._begin)
        except UnavailableError as error:
            last = self._failures.last
            if last is None:
                raise
            if last.kind is ErrorKind.INVALID_REQUEST:  # every worker that is attached has refused its size
                raise last from error
            raise type(last)(f"{last.message}; then {error.message}", param=last.param) from error
        self.record.bound()
        return attempt

    def _wish(self) -> PlacementRequest:
        request = self.request
        failures = self._failures
        return PlacementRequest(
            num_prompt_tokens=len(request.prompt_token_ids) + len(self._delivered),
            num_answer_tokens=request.num_answer_tokens * (1 + len(self._followers)),
            num_choices=1 + len(self._followers),
            num_delivered=len(self._delivered),
            max_length=request.max_length,
            may_be_cut=request.fills_model or bool(self._delivered),
            prefer=failures.prefer,
            avoid=failures.avoid,
            too_small=failures.too_small,
            is_replay=self._num_attempts > 0,
            is_local=failures.is_local,
            is_embedding=request.is_embedding,
        )

    def _claim(self, wish: PlacementRequest) -> QueueOrder:
        request = self.request
        return QueueOrder(
            priority=request.priority,
            tenant=request.tenant,
            family=request.family,
            arrival=request.arrival,
            cost=float(wish.num_prompt_tokens + wish.num_answer_tokens + 1),
            is_replay=wish.is_replay,
        )

    def _begin(self, placement: Placement) -> Attempt:
        followers = self._followers
        self._followers = []
        others = [follower.begin_behind(placement) for follower in followers]
        return self._new_attempt(placement).begin(*others)

    def _new_attempt(self, placement: Placement) -> Attempt:
        number = self._num_attempts
        self._num_attempts += 1
        attempt = Attempt(
            self.request,
            self._delivered,
            number,
            legs_of(placement, self._parts.registry, self._parts.kinds),
            self._parts.tasks,
            self.report,
            self._unread,
            self._parts.unread.max_of_answer,
        )
        if attempt.hand_over:
            self._parts.severed.probe(*attempt.hand_over)
        elif attempt.legs[-1].worker.role is Role.DECODE:
            self.record.recomputed_locally(placement.end)
        return attempt
