"""The run of one answer over as many attempts as it takes: the death of a worker does not end a request (law 5).

An attempt that fails is closed, which cancels what is left of it. The next one continues where it stopped, with the prompt
and the tokens that were delivered, on other workers where there are any (``router/attempts/failures.py``). It is admitted
before the requests of its priority that were not begun yet. Tokens of older attempts that still arrive are dropped.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from msgspec import structs

from contract.errors import KvbatonError, UnavailableError
from router.admission.admission_queue import AdmissionQueue
from router.admission.fair_queue import QueueOrder
from router.admission.reservation import Reservation
from router.admission.unreachable_pairs import UnreachablePairs
from router.attempts.attempt import Attempt, begin
from router.attempts.attempt_legs import AttemptLegs
from router.attempts.attempt_output import AttemptOutput
from router.attempts.failures import Failures
from router.attempts.leg_outcome import Failure, LegReport, deadline_error
from router.attempts.leg_requests import AttemptTask
from router.attempts.request_tracker import RequestTracker
from router.attempts.suspects import Suspects
from router.attempts.tracked_request import TrackedRequest
from router.concurrency.tasks import cooperatively
from router.intake.prepared_request import PreparedRequest
from router.intake.request import EmbeddingRequest, GenerationRequest
from router.routing.legs import CONTINUATION, LEG_KINDS, LegKind
from router.routing.policy import PlacementRequest
from router.tokens.delivery import TokenBatch
from router.tokens.inbox import Take, UnreadAccount, UnreadBytes
from router.workers.attached_worker import AttachedWorker

_NO_TURN = nullcontext(frozenset[str]())


@dataclass(frozen=True)
class RequestRuns:
    """Opens request runs, and holds the parts of the router that they share.

    max_replays: attempts in a row that may fail without a token of a last leg (tokens of prefill legs prove nothing about
    the hand-over). max_worker_deaths: workers that may be lost with one answer. unread: bounds what waits in the router
    because clients do not read. kinds: the kinds of leg that placements name. open_runs: the runs whose block has not ended.
    """

    queue: AdmissionQueue
    unreachable: UnreachablePairs
    unread: UnreadBytes
    max_replays: int
    max_worker_deaths: int
    suspects: Suspects
    kinds: Mapping[str, LegKind] = field(default_factory=lambda: LEG_KINDS)
    open_runs: "set[RequestRun]" = field(default_factory=set)

    def open(
        self, request: PreparedRequest, tracked: Sequence[TrackedRequest], unread: UnreadAccount
    ) -> "PromptRuns":
        """Open a run for each choice of a prompt, one for each tracked request.

        The workers that begin them compute the prompt once and hand it over once. unread: the account of the client's
        request that the prompt is a part of.
        """
        prompt = PromptRuns(self.open_runs)
        for choice, each in enumerate(tracked):
            prompt.runs.append(RequestRun(self, prompt, request.of_choice(choice), each, unread))
        self.open_runs.update(prompt.runs)
        return prompt


class PromptRuns:
    """The runs of all choices of one prompt, until its block or ``close`` ends them.

    lock: held by the one that waits for workers for all of them. has_begun: the first of them have begun together; the
    others begin one by one.
    """

    def __init__(self, open_runs: "set[RequestRun]") -> None:
        self.runs: list[RequestRun] = []
        self.lock = asyncio.Lock()
        self.has_begun = False
        self._open_runs = open_runs

    def __enter__(self) -> "list[RequestRun]":
        return self.runs

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all runs. Does nothing the second time."""
        runs = self.runs
        self.runs = []  # a cycle of references would wait for the search for garbage
        self._open_runs.difference_update(runs)
        for run in runs:
            run.close()


class RequestRun:
    """Owns the attempts of one choice, one at a time, and the tokens that were delivered."""

    def __init__(
        self,
        parts: RequestRuns,
        prompt: PromptRuns,
        request: PreparedRequest,
        tracked: TrackedRequest,
        unread: UnreadAccount,
    ) -> None:
        self.request = request
        self.tracked = tracked
        self.report = LegReport()
        self._parts = parts
        self._prompt = prompt
        self._unread = unread
        self._delivered: list[int] = []
        self._attempt: Attempt | None = None
        self._num_attempts = 0
        self._failures = Failures(parts.unreachable, parts.max_replays, parts.max_worker_deaths)

    def close(self) -> None:
        """End the attempt that runs. Does nothing the second time."""
        self._end_attempt()
        self._parts.suspects.remove(self)

    def _end_attempt(self) -> None:
        if attempt := self._attempt:
            self._attempt = None
            attempt.close()

    def leave(self, worker: AttachedWorker, error: KvbatonError, *, only_unstarted: bool = False) -> bool:
        """Fail the attempt that runs with ``error`` if it has a leg on this worker; see ``Attempt.leave``."""
        attempt = self._attempt
        return attempt is not None and attempt.leave(worker, error, only_unstarted=only_unstarted)

    async def next(self, take: Take[TokenBatch] | None = None) -> TokenBatch:
        """Return the next tokens, of whichever attempt emits them. Raises the error that no further attempt can cure.

        take: takes tokens in the turn of the event loop in which they arrive, while the caller waits. They are not returned.
        """
        while True:
            attempt = self._attempt or await self._begin()
            try:
                batch = await attempt.next(self._taking(attempt, take))
            except KvbatonError as error:
                attempt = self._attempt or attempt  # the answer may have been moved meanwhile
                self._end_attempt()
                self._failures.note(attempt, error)
                self.tracked.replayed(error, len(self._delivered))
            else:
                self._note(self._attempt or attempt, batch)
                return batch

    def _taking(self, attempt: Attempt, take: Take[TokenBatch] | None) -> Take[TokenBatch] | None:
        """Return a function that notes the tokens of an attempt which ``take`` has taken."""
        if take is None:
            return None

        def taken(batch: TokenBatch) -> bool:
            is_taken = take(batch)
            if is_taken:
                self._note(self._attempt or attempt, batch)  # the answer may have been moved meanwhile
            return is_taken

        return taken

    def _note(self, attempt: Attempt, batch: TokenBatch) -> None:
        """Record that tokens of an attempt are on their way to the client."""
        if batch.tokens and not self._delivered:
            attempt.legs.first.worker.latency.first_token.add(time.monotonic() - self.request.arrival)
        for token in batch.tokens:
            self._delivered.append(token.token_id)
        if attempt is not self._failures.proven and attempt.is_decoding:
            self._failures.progress(attempt)

    async def _begin(self) -> Attempt:
        """Begin the next attempt. The first attempts of all choices of a prompt begin together, as far as their client may.

        Raises DeadlineError if the deadline passes before that.
        """
        if pause := self._failures.pause_seconds:
            await asyncio.sleep(min(pause, max(0.0, self.request.deadline - time.monotonic())))
        self.tracked.queued()
        prompt = self._prompt
        if not self._num_attempts and len(prompt.runs) > 1:
            async with prompt.lock:
                if not prompt.has_begun:
                    await self._begin_attempts(prompt.runs)
                    prompt.has_begun = True
            if self._attempt:
                return self._attempt
        await self._begin_attempts([self])
        assert self._attempt is not None, "one choice always begins"
        return self._attempt

    async def _begin_attempts(self, runs: "Sequence[RequestRun]") -> None:
        """Wait for workers, and begin an attempt there for each of the first runs, for as many as are admitted."""
        request = self._placement_request(len(runs))
        deadline = self.request.deadline
        suspects = self._parts.suspects
        turn = suspects.turn(self, request, deadline) if self._failures.is_suspect else _NO_TURN
        try:
            async with turn as occupied:
                request = structs.replace(request, full=occupied) if occupied else request
                with await self._parts.queue.reserve(
                    request, _order(self.request, request), deadline
                ) as reservation:
                    begin(
                        [run.new_attempt(reservation) for run in runs[: reservation.num_choices]], reservation
                    )
        except TimeoutError:
            raise deadline_error(len(self._delivered)) from None
        except UnavailableError as error:
            if self._failures.last is None:
                raise
            raise self._failures.without_workers(error) from error

    @property
    def attempt(self) -> Attempt | None:
        """The attempt that runs."""
        return self._attempt

    @property
    def known_tokens(self) -> list[int]:
        """The tokens of the answer that have arrived, whether the client has read them or not."""
        return [*self._delivered, *self._unread_tokens()]

    @property
    def num_known_tokens(self) -> int:
        """The number of ``known_tokens``, without a list of them."""
        return len(self._delivered) + len(self._unread_tokens())

    def _unread_tokens(self) -> list[int]:
        return self._attempt.unread if self._attempt else []

    def take_number(self) -> int:
        """Return the number of the next attempt, which no other one will have."""
        number = self._num_attempts
        self._num_attempts += 1
        return number

    def return_number(self, number: int) -> None:
        """Use a number again that no worker has seen. Does nothing if a later one is taken."""
        if number == self._num_attempts - 1:
            self._num_attempts = number

    def target_failed(self, attempt: Attempt, failure: Failure) -> None:
        """Record how a worker has failed to which the answer was to move; see ``Failures.note_target``."""
        self._failures.note_target(attempt, failure)

    def continue_with(self, attempt: Attempt) -> None:
        """Use an attempt that has taken over from the one that ran."""
        self._attempt = attempt

    def new_attempt(self, reservation: Reservation) -> Attempt:
        """Make the run's next attempt, which is to begin on the reserved workers now."""
        task = AttemptTask(self.request, tuple(self._delivered), self.take_number())
        legs = AttemptLegs.of(reservation, self._parts.kinds)
        output = AttemptOutput(len(self._delivered), self._unread, self._parts.unread.max_of_answer)
        self._attempt = Attempt(task, legs, self.report, output)
        if (local := legs.computed_by_decoder) or task.number:
            self.tracked.recomputed(len(task.prompt), local)
        self.tracked.bound()
        return self._attempt

    def move_request(self, excluded: frozenset[str]) -> tuple[PlacementRequest, QueueOrder]:
        """Return what another worker needs to continue the answer, and its place in the queue: before all new requests.

        excluded: workers that must not be chosen. The answer is not cut to fit one.
        """
        request = structs.replace(
            self._placement_request(1),
            plan=CONTINUATION,
            num_prompt_tokens=len(self.request.prompt_token_ids) + self.num_known_tokens,
            may_be_cut=False,
            too_small=self._failures.too_small | excluded | self._parts.suspects.occupied(self),
            is_replay=True,
            is_local=False,
        )
        return request, _order(self.request, request)

    def _placement_request(self, num_choices: int) -> PlacementRequest:
        request = self.request
        failures = self._failures
        return PlacementRequest(
            num_prompt_tokens=len(request.prompt_token_ids) + len(self._delivered),
            num_answer_tokens=request.num_answer_tokens,
            num_choices=num_choices,
            num_delivered=len(self._delivered),
            plan=request.plan,
            max_length=request.max_length,
            may_be_cut=request.fills_model or bool(self._delivered),
            prefer=failures.prefer,
            avoid=failures.avoid,
            too_small=failures.too_small,
            is_replay=self._num_attempts > 0,
            is_local=failures.is_local,
        )


def _order(request: PreparedRequest, placement: PlacementRequest) -> QueueOrder:
    return QueueOrder(
        priority=request.priority,
        tenant=request.tenant,
        family=request.family,
        arrival=request.arrival,
        cost=float(placement.num_tokens + 1),
        is_replay=placement.is_replay,
    )


class OpenAnswers:
    """Owns the answers of one client's request until its block ends: their places in the tracker, and their runs.

    runs: one for each answer, in order, after ``open_runs``.
    """

    def __init__(self, tracker: RequestTracker, runs: RequestRuns) -> None:
        self.runs: list[RequestRun] = []
        self._tracker = tracker
        self._parts = runs
        self._tracked: list[list[TrackedRequest]] = []
        self._prompts: list[PromptRuns] = []
        self._unread: UnreadAccount | None = None

    def __enter__(self) -> "OpenAnswers":
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        try:
            for prompt in reversed(self._prompts):
                prompt.close()
            if self._unread:
                self._unread.close()
        finally:
            for answers in reversed(self._tracked):
                for tracked in reversed(answers):
                    tracked.leave(error)

    async def admit(self, requests: Sequence[GenerationRequest | EmbeddingRequest]) -> None:
        """Admit every answer to the prompts. Raises OverloadedError, UnavailableError."""
        async for request in cooperatively(requests):
            answers: list[TrackedRequest] = []
            self._tracked.append(answers)
            for _ in request.choices:
                answers.append(self._tracker.open(request))  # noqa: PERF401 - those that were admitted leave if one is not

    async def open_runs(self, prepared: Sequence[PreparedRequest], tenant: str) -> None:
        """Open a run for every answer to the prompts, which were admitted before."""
        self._unread = self._parts.unread.open(tenant)
        async for prompt, answers in cooperatively(zip(prepared, self._tracked, strict=True)):
            opened = self._parts.open(prompt, answers, self._unread)
            self._prompts.append(opened)
            self.runs += opened.runs
