"""One try at one choice of a request: a leg on each of its workers, and their tokens in order.

1. ``begin`` binds the legs of all choices of a prompt to the reserved workers, and starts all legs at the same time.
2. What the workers send is processed when it arrives. A leg is unbound when its worker has no more work for it, however
   slowly the client reads.
3. ``next`` returns the tokens. After a hand-over the first one comes from the prefill worker, the others from the decode
   worker.
4. ``close``, or the request's deadline, unbinds the legs and cancels them on the workers that may still hold something.

How one leg takes over from another follows from their order and from the table of kinds (``router/routing/legs.py``).
"""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from contract.errors import ErrorKind, InternalError, KvbatonError, WorkerLostError
from contract.outputs import EngineOutput, FinishReason, RequestTimings
from protos import worker_pb2 as pb
from router.admission.reservation import Reservation
from router.attempts.attempt_legs import AttemptLegs, Leg, start
from router.attempts.leg_outcome import Failure, LegReport, PostponedFailure, deadline_error
from router.attempts.leg_requests import AttemptTask, check_output, error_of, leg_request, transfers_of
from router.routing.legs import Result
from router.tokens.delivery import AttemptOutput, TokenBatch
from router.tokens.inbox import Consume, Event
from router.workers.attached_worker import AttachedWorker
from router.workers.capacity import CreditHold
from wire.tokens import output_from_proto

_FAILED = frozenset({FinishReason.ERROR, FinishReason.ABORT})


class AttemptOwner(Protocol):
    """Receives the events of an attempt, each in its turn of the event loop. ``CurrentAttempt`` does.

    The owner may put another attempt in its place, or another leg in the place of its last one.
    """

    def on_handed_off(self, attempt: "Attempt", num_tokens: int, /) -> None:
        """Continue elsewhere: the last leg's worker lends the KV of ``num_tokens`` tokens but the last.

        Raises KvbatonError if that is not possible.
        """

    def on_last_leg_began(self, timings: RequestTimings | None, /) -> None:
        """Take note that the last leg has emitted its first token. timings: what its worker reports with it."""

    def on_last_leg_failed(self, failure: Failure, /) -> bool:
        """Return True if another leg will replace the last one, which has emitted nothing: the attempt goes on."""

    def on_ended(self, attempt: "Attempt", /) -> None:
        """Take note that the attempt has ended, by itself, by a cancel, or by its ``failure``. May be called again."""


class Attempt:
    """Owns the legs of one attempt, and what they have sent.

    report: collects what the workers report about themselves. output: where the tokens go. failure: set once the attempt has
    failed.
    """

    def __init__(
        self,
        task: AttemptTask,
        legs: AttemptLegs,
        report: LegReport,
        output: AttemptOutput,
        owner: AttemptOwner,
    ) -> None:
        self.task = task
        self.legs = legs
        self.failure: Failure | None = None
        self.output = output
        output.belong_to(task.number, self.settle)
        self._owner = owner
        self.report = report
        self._postponed: PostponedFailure | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_decoding(self) -> bool:
        """True if a token of the last leg has arrived: the hand-over, if there was one, has succeeded."""
        return self.legs.last.has_emitted

    def bind(self, holds: Sequence[CreditHold]) -> None:
        """Bind the legs to their workers, with the credit that was reserved there, until the deadline at the latest."""
        self.legs.bind(self.task.key, self._receive, holds)
        seconds = max(0.0, self.task.request.deadline - time.monotonic())
        # one timer for the attempt: ``asyncio.timeout`` around the wait for each token takes 4 to 5 µs
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)

    def close(self) -> None:
        """End the attempt: unbind and cancel its legs, drop what is unread. Does nothing the second time."""
        self.settle()
        self.output.close()

    def leave(self, worker: AttachedWorker, error: KvbatonError, *, only_unstarted: bool) -> bool:
        """Fail with ``error`` if a leg is bound to this worker; return whether one was.

        only_unstarted: leave every leg alone but the last one, and that one too if it has emitted tokens.
        """
        for leg in self.legs:
            is_movable = not only_unstarted or (leg is self.legs.last and leg.is_awaited)
            if leg.worker is worker and self.legs.is_open(leg) and is_movable:
                self._receive(leg, error)
                return True
        return False

    def decodes_on(self, worker: AttachedWorker) -> bool:
        """Return True if the answer's tokens come from this worker, and no earlier leg is still to emit one."""
        leg = self.legs.last
        is_decoding = self.legs.is_open(leg) and leg.has_emitted and self.legs.is_needed(leg)
        return leg.worker is worker and is_decoding and leg.kind.result is Result.TOKENS

    def next(self, consume: Consume[TokenBatch] | None = None) -> Coroutine[Any, Any, TokenBatch]:
        """Return the next tokens. Raises the error that ended a leg (``failure`` then names the failed workers).

        WorkerLostError, the worker's own error; CancelledError when too many bytes are unread; DeadlineError.
        consume: gets tokens that arrive while the caller waits.
        """
        return self.output.next(consume)

    def settle(self) -> None:
        """Release the workers. Does nothing the second time."""
        self._owner.on_ended(self)
        if self._timer:
            self._timer.cancel()
        if self._postponed:
            self._postponed.cancel()
        self.legs.release()

    def fail(self, failure: Failure) -> None:
        """End the attempt with a failure, unless it has ended already."""
        is_first = self.failure is None and not self.output.is_complete
        if is_first:
            self.failure = failure  # before ``settle``: the owner reads it
        self.settle()
        if is_first:
            self.output.fail(failure.error)

    def _receive(self, leg: Leg, event: Event) -> None:
        """Process an event of a leg when it arrives. Tokens that are due wait in the inbox for the client."""
        if not self.legs.is_open(leg):
            return
        if isinstance(event, KvbatonError):
            self._fail_leg(Failure(event, leg.worker, frozenset({leg.worker})), leg)
            return
        try:
            self._process(leg, event)
        except KvbatonError as error:
            failed = frozenset({leg.worker}) if event.is_rejected else self._failed_workers(leg, error)
            self._fail_leg(Failure(error, leg.worker, failed), leg)
            return
        if self.output.is_complete:
            self.settle()
        self.output.release()
        if self._postponed and self.legs.is_needed(self._postponed.leg):
            self.fail(self._postponed.failure)

    def _failed_workers(self, leg: Leg, error: KvbatonError) -> frozenset[AttachedWorker]:
        """Return the workers that may be at fault for an error in an entry: both ends of an incomplete hand-over."""
        if error.kind is ErrorKind.WORKER_LOST and leg.may_hold:
            return frozenset({leg.worker})
        holding = (each for each in self.legs if self.legs.is_open(each) and each.may_hold)
        return frozenset({leg.worker, *(each.worker for each in holding)})

    def _fail_leg(self, failure: Failure, leg: Leg) -> None:
        """End the attempt, unless an earlier leg's token, still to come, may make the leg's failure irrelevant."""
        if self._postponed:
            # Another leg has failed before: no token is left that could make either failure irrelevant.
            self.fail(failure.after(self._postponed.failure))
        elif self.legs.is_needed(leg):
            # Before its first token, the last leg may begin again elsewhere: a migration still has the KV lent.
            if leg is not self.legs.last or leg.has_emitted or not self._owner.on_last_leg_failed(failure):
                self.fail(failure)
        else:
            # The prefill leg still computes. Its token may end the answer, and does if no further one is allowed.
            is_last_token = leg.first_index >= self.task.request.sampling.max_tokens
            self._postponed = PostponedFailure(failure, leg, self.fail, is_last_token=is_last_token)
            if not leg.may_hold:
                self.legs.unbind(leg)

    def _expire(self) -> None:
        """End the attempt at the deadline. No worker has failed, so no other attempt follows."""
        self.settle()
        self.output.fail(deadline_error(self.output.num_tokens))

    def _process(self, leg: Leg, entry: pb.TokenEntry) -> None:
        """Process an entry of a leg: its tokens, what it reports, and its end."""
        output = _read(entry, leg.worker.name)
        if output.finish_reason in _FAILED:
            leg.may_hold = False
            raise error_of(output, leg.worker.name)
        # A gap never closes: a worker sends each token once, and the stream keeps their order.
        if output.token_ids and output.first_index > leg.next_index:
            raise WorkerLostError(
                f"worker {leg.worker.name} sent token {output.first_index} after token {leg.next_index - 1}"
            )
        request = self.task.request
        check_output(output, request, self.legs.end_of(leg, request.sampling.max_tokens), leg.worker.name)
        if output.handed_over:
            self._owner.on_handed_off(self, output.first_index)
            return
        is_first = bool(output.token_ids) and not leg.has_emitted
        if is_first:
            # It has read all KV by now, so that the death of the worker that computed it no longer matters.
            self.legs.end_earlier(leg)
            if leg is self.legs.last:
                self._owner.on_last_leg_began(output.timings)
        leg.next_index = max(leg.next_index, output.first_index + len(output.token_ids))
        if output.finish_reason:
            # the worker has done its part, which ends the answer if the leg contributes to it
            if leg.kind.result is Result.EMBEDDING and not output.pooled:
                raise InternalError(f"worker {leg.worker.name} has ended an embedding without one")
            if leg.kind.result is not Result.NONE:
                self.output.end_with(output, leg.next_index)
            leg.on_ended()
        self.output.add(output, entry)
        # no other entry has a report, or changes whether a leg is over
        if is_first or output.finish_reason:
            self.report.add(output, has_transfer=leg is self.legs.last and leg.first_index == 1)
            self.legs.unbind_finished()


def _read(entry: pb.TokenEntry, worker: str) -> EngineOutput:
    """Return what a worker has sent. Raises WorkerLostError for an entry that no healthy worker sends."""
    try:
        return output_from_proto(entry)
    except KvbatonError as error:
        raise WorkerLostError(f"worker {worker} is at fault: {error.message}") from error


def begin(attempts: Sequence[Attempt], reservation: Reservation) -> None:
    """Begin the attempts of all choices of a prompt on the reserved workers, each of which receives one order for all.

    If a worker was lost meanwhile, the attempts fail, and no worker receives an order.
    """
    first = attempts[0]
    for attempt, holds in zip(attempts, reservation.detach_holds(), strict=True):
        attempt.bind(holds)
    if lost := reservation.lost_workers:
        for attempt in attempts:
            error = WorkerLostError(f"worker {lost[0].name} was lost before the request was sent to it")
            for leg in attempt.legs:
                leg.may_hold = False  # no worker has received anything that could be cancelled
            attempt.fail(Failure(error, lost[0], frozenset(lost)))
        return
    request_id, number, _ = first.task.key
    transfers = transfers_of(first.legs, f"{request_id}.{number}")
    on_sent = reservation.begin(num_orders=len(transfers))
    for legs, transfer in zip(
        zip(*(attempt.legs for attempt in attempts), strict=True), transfers, strict=True
    ):
        request = leg_request(first.task, legs[0], num_choices=len(attempts), transfer=transfer)
        start(legs, request, on_sent)
