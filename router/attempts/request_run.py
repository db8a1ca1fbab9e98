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
from contract.identity import Role
from contract.layout import weights_of
from router.admission.admission_queue import AdmissionQueue
from router.admission.fair_queue import QueueOrder
from router.admission.reservation import Reservation
from router.admission.unreachable_pairs import UnreachablePairs
from router.attempts.attempt import Attempt, begin
from router.attempts.attempt_legs import AttemptLegs
from router.attempts.current_attempt import CurrentAttempt
from router.attempts.failures import Failures
from router.attempts.leg_outcome import LegReport, deadline_error
from router.attempts.leg_requests import AttemptTask
from router.attempts.request_tracker import RequestState, RequestTracker, TrackedRequest
from router.attempts.suspects import Suspects
from router.concurrency import rest_after
from router.intake.prepared_request import PreparedRequest
from router.intake.request import EmbeddingRequest, GenerationRequest
from router.routing.legs import CONTINUATION, LEG_KINDS, LegKind
from router.routing.policy import PlacementRequest
from router.tokens.delivery import AttemptOutput, TokenBatch
from router.tokens.inbox import Consume, UnreadAccount, UnreadBytes
from router.workers.attached_worker import AttachedWorker

_NO_TURN = nullcontext(None)


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
        prompt = PromptRuns(self, unread)
        for choice, each in enumerate(tracked):
            prompt.runs.append(RequestRun(prompt, request.of_choice(choice), each))
        self.open_runs.update(prompt.runs)
        return prompt


class PromptRuns:
    """The runs of all choices of one prompt, until its block or ``close`` ends them.

    lock: held by the one that waits for workers for all of them. has_begun: the first of them have begun together; the
    others begin one by one. parts, unread: see ``RequestRuns.open``.
    """

    def __init__(self, parts: RequestRuns, unread: UnreadAccount) -> None:
        self.runs: list[RequestRun] = []
        self.lock = asyncio.Lock()
        self.has_begun = False
        self.parts = parts
        self.unread = unread

    def __enter__(self) -> "list[RequestRun]":
        return self.runs

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all runs. Does nothing the second time."""
        runs = self.runs
        self.runs = []  # a cycle of references would wait for the search for garbage
        self.parts.open_runs.difference_update(runs)
        for run in runs:
            run.close()


class RequestRun:
    """Owns the attempts of one choice, one at a time, and the tokens that were delivered.

    current: the attempt that runs. failures: those of earlier ones. known_tokens: those that have arrived, whether the
    client has read them or not: an attempt's failure reaches the client behind all of them, so a replay begins there.
    """

    def __init__(self, prompt: PromptRuns, request: PreparedRequest, tracked: TrackedRequest) -> None:
        self.request = request
        self.tracked = tracked
        self.report = LegReport()
        self.current = CurrentAttempt()
        self._prompt = prompt
        self.known_tokens: list[int] = []
        self._weights = ""
        parts = prompt.parts
        self.failures = Failures(parts.unreachable, parts.max_replays, parts.max_worker_deaths)

    @property
    def is_interrupted(self) -> bool:
        """True if tokens were delivered and the rest is to be computed by another attempt, which has not begun."""
        attempt = self.current.attempt
        is_waiting = self.tracked.state is RequestState.WAITING_FOR_WORKERS
        has_failed = attempt is not None and attempt.failure is not None
        return bool(self.known_tokens) and (is_waiting or has_failed)

    def close(self) -> None:
        """End the attempt that runs. Does nothing the second time."""
        self.current.close()
        self._prompt.parts.suspects.remove(self)

    def leave(self, worker: AttachedWorker, error: KvbatonError, *, only_unstarted: bool = False) -> bool:
        """Fail the attempt that runs with ``error`` if it has a leg on this worker; see ``Attempt.leave``."""
        attempt = self.current.attempt
        return attempt is not None and attempt.leave(worker, error, only_unstarted=only_unstarted)

    async def next(self, consume: Consume[TokenBatch] | None = None) -> TokenBatch:
        """Return the next tokens, of whichever attempt emits them. Raises the error that no further attempt can cure.

        The first attempts of all choices of a prompt begin together, as far as their client may. Raises DeadlineError if
        the deadline passes before an attempt begins.

        consume: gets tokens in the turn of the event loop in which they arrive, while the caller waits.
        """
        while True:
            if (attempt := self.current.attempt) is None:
                if pause := self.failures.pause_seconds:
                    await asyncio.sleep(min(pause, max(0.0, self.request.deadline - time.monotonic())))
                self.tracked.on_queued()
                prompt = self._prompt
                if not self.current.num_attempts and len(prompt.runs) > 1:
                    # the first choice that comes begins as many as their client may; the others find theirs
                    async with prompt.lock:
                        if not prompt.has_begun:
                            await self._begin(prompt.runs)
                            prompt.has_begun = True
                if not self.current.attempt:
                    await self._begin([self])
                attempt = self.current.attempt
                assert attempt is not None, "one choice always begins"
            try:
                return await attempt.next(consume)
            except KvbatonError as error:
                attempt = self.current.attempt or attempt  # the answer may have been moved meanwhile
                self.current.close()
                self.failures.note(attempt, error)
                self.tracked.on_replayed(error, len(self.known_tokens))

    def _note(self, batch: TokenBatch) -> None:
        """Record tokens of the attempt that runs. They have arrived; the client may not have read them yet."""
        attempt = self.current.attempt
        assert attempt is not None, "what another attempt sends is dropped"
        if batch.tokens and not self.known_tokens:
            attempt.legs.first.worker.latency.first_token.add(time.monotonic() - self.request.arrival)
        for token in batch.tokens:
            self.known_tokens.append(token.token_id)
        if attempt is not self.failures.proven and attempt.is_decoding:
            self.failures.progress(attempt)

    async def _begin(self, runs: "Sequence[RequestRun]") -> None:
        """Wait for workers, and begin an attempt there for each of the first runs, for as many as are admitted."""
        request = self._placement_request(len(runs))
        deadline = self.request.deadline
        suspects = self._prompt.parts.suspects
        turn = suspects.turn(self, deadline) if self.failures.is_suspect else _NO_TURN
        try:
            async with turn as occupied:
                if occupied is not None:  # it is a suspect, as few requests are
                    request = structs.replace(request, full=occupied)
                with await self._prompt.parts.queue.reserve(
                    request, _order(self.request, request), deadline
                ) as reservation:
                    begin(
                        [run.new_attempt(reservation) for run in runs[: reservation.num_choices]], reservation
                    )
        except TimeoutError:
            raise deadline_error(len(self.known_tokens)) from None
        except UnavailableError as error:
            if self.failures.last is None:
                raise
            raise self.failures.without_workers(error) from error

    def new_attempt(self, reservation: Reservation) -> Attempt:
        """Make the run's next attempt, which is to begin on the reserved workers now.

        Raises UnavailableError if the tokens that were delivered are those of former weights.
        """
        weights = weights_of(reservation.workers[-1].registration.model_fingerprint)
        if self.known_tokens and weights != self._weights:
            raise UnavailableError(
                "the weights were reloaded before the answer could be continued; send the request again"
            )
        self._weights = weights
        task = AttemptTask(self.request, tuple(self.known_tokens), self.current.next_number())
        legs = AttemptLegs.of(reservation, self._prompt.parts.kinds)
        prompt = self._prompt
        output = AttemptOutput(
            len(self.known_tokens), prompt.unread, prompt.parts.unread.max_of_answer, self._note
        )
        self.current.attempt = Attempt(task, legs, self.report, output, self.current)
        end = legs.last.worker
        # a decode worker to which nothing is handed over computes the prompt itself
        local = end.name if end.role is Role.DECODE and not legs.hand_over else None
        if local or task.number:
            self.tracked.on_recomputed(len(task.prompt), local)
        self.tracked.on_bound()
        return self.current.attempt

    def move_request(self, excluded: frozenset[str]) -> tuple[PlacementRequest, QueueOrder]:
        """Return what another worker needs to continue the answer, and its place in the queue: before all new requests.

        excluded: workers that must not be chosen. The answer is not cut to fit one.
        """
        request = structs.replace(
            self._placement_request(1),
            plan=CONTINUATION,
            may_be_cut=False,
            too_small=self.failures.too_small | excluded | self._prompt.parts.suspects.occupied(self),
            is_replay=True,
            is_local=False,
        )
        return request, _order(self.request, request)

    def _placement_request(self, num_choices: int) -> PlacementRequest:
        request = self.request
        failures = self.failures
        return PlacementRequest(
            num_prompt_tokens=len(request.prompt_token_ids) + len(self.known_tokens),
            num_answer_tokens=request.num_answer_tokens,
            num_choices=num_choices,
            num_delivered=len(self.known_tokens),
            plan=request.plan,
            max_length=request.max_length,
            may_be_cut=request.fills_model or bool(self.known_tokens),
            prefer=failures.prefer,
            avoid=failures.avoid,
            too_small=failures.too_small,
            is_replay=self.current.num_attempts > 0,
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
        for number, request in enumerate(requests, 1):
            answers: list[TrackedRequest] = []
            self._tracked.append(answers)
            for _ in request.choices:
                answers.append(self._tracker.open(request))  # noqa: PERF401 - those that were admitted leave if one is not
            await rest_after(number)

    async def open_runs(self, prepared: Sequence[PreparedRequest], tenant: str) -> None:
        """Open a run for every answer to the prompts, which were admitted before."""
        self._unread = self._parts.unread.open(tenant)
        for number, (prompt, answers) in enumerate(zip(prepared, self._tracked, strict=True), 1):
            opened = self._parts.open(prompt, answers, self._unread)
            self._prompts.append(opened)
            self.runs += opened.runs
            await rest_after(number)
