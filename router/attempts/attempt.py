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
from router.attempts.attempt_legs import AttemptLegs
from router.attempts.attempt_output import AttemptOutput
from router.attempts.bound_leg import Leg, start
from router.attempts.leg_outcome import Failure, LegReport, PostponedFailure, deadline_error
from router.attempts.leg_requests import AttemptTask, check_output, error_of, leg_request, transfers_of
from router.routing.legs import Result
from router.tokens.delivery import TokenBatch
from router.tokens.inbox import Event, Take
from router.workers.attached_worker import AttachedWorker
from router.workers.capacity import CreditHold
from wire.tokens import output_from_proto

_FAILED = (FinishReason.ERROR, FinishReason.ABORT)


class MoveEvents(Protocol):
    """The events of an attempt that matter to a move of its answer (``migration/move.py``), in the turn of the event."""

    def handed_over(self, attempt: "Attempt", num_tokens: int) -> None:
        """Continue elsewhere: the last leg's worker lends the KV of ``num_tokens`` tokens but the last.

        Raises KvbatonError if that is not possible.
        """

    def continued(self, timings: RequestTimings | None, /) -> None:
        """Record that the last leg has emitted its first token. timings: what its worker reports with it."""

    def target_failed(self, failure: Failure, /) -> bool:
        """Return True if the last leg, which has emitted nothing, begins again at another worker: the attempt goes on."""

    def attempt_ended(self) -> None:
        """Record that the attempt has ended: by itself, by a failure or by a cancel."""


class NoMove:
    """Fulfils ``MoveEvents`` for an attempt whose answer is not moved."""

    def handed_over(self, attempt: "Attempt", num_tokens: int) -> None:
        """Raise WorkerLostError: nothing is reserved for the rest of the answer."""
        raise WorkerLostError(
            f"worker {attempt.legs.last.worker.name} has handed the request off after {num_tokens} tokens, "
            "and it is not moved"
        )

    def continued(self, _timings: RequestTimings | None, /) -> None:
        """Do nothing."""

    def target_failed(self, _failure: Failure, /) -> bool:
        """Return False: nothing else is lent the attempt's KV."""
        return False

    def attempt_ended(self) -> None:
        """Do nothing."""


_NO_MOVE = NoMove()


class Attempt:
    """Owns the legs of one attempt, and what they have sent.

    report: collects what the workers report about themselves. output: where the tokens go. failure: set once the attempt has
    failed. move: of the answer to another worker, if there is one.
    """

    def __init__(
        self, task: AttemptTask, legs: AttemptLegs, report: LegReport, output: AttemptOutput
    ) -> None:
        self.task = task
        self.legs = legs
        self.failure: Failure | None = None
        self.move: MoveEvents = _NO_MOVE
        self._output = output
        output.belong_to(task.number, self._settle)
        self._report = report
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

    def fail_unstarted(self, lost: Sequence[AttachedWorker]) -> None:
        """End the attempt before its legs are started: these workers were lost after they had been chosen."""
        for leg in self.legs:
            leg.may_hold = False  # no worker has received anything that could be cancelled
        error = WorkerLostError(f"worker {lost[0].name} was lost before the request was sent to it")
        self._end_with(Failure(error, lost[0], frozenset(lost)))

    def close(self) -> None:
        """End the attempt: unbind and cancel its legs, drop what is unread. Does nothing the second time."""
        self._settle()
        self._output.close()

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

    def can_be_moved_from(self, worker: AttachedWorker) -> bool:
        """Return True if the last leg decodes on this worker, and is not being moved already."""
        leg = self.legs.last
        is_decoding = self.legs.is_open(leg) and leg.has_emitted and self.legs.is_needed(leg)
        return leg.worker is worker and is_decoding and leg.kind.result is Result.TOKENS and not self.is_moved

    @property
    def is_moved(self) -> bool:
        """True while the answer is being moved to another worker."""
        return self.move is not _NO_MOVE

    def stay(self, move: MoveEvents) -> None:
        """Record that this move is given up. Does nothing if it is not the attempt's."""
        if self.move is move:
            self.move = _NO_MOVE

    @property
    def unread(self) -> list[int]:
        """The tokens that have arrived and that the client has not read."""
        return self._output.unread

    def continue_with(self, task: AttemptTask, legs: AttemptLegs, hold: CreditHold) -> "Attempt":
        """End this attempt, whose last leg was handed off, and return the one that takes its output over.

        The first of its legs stands for the lease, with the credit of the leg that was handed off. hold: the credit for the
        other one.
        """
        lent = self.legs.last.handed_off()
        attempt = Attempt(task, legs, self._report, self._output)
        attempt.move = self.move
        self.move = _NO_MOVE
        self._settle()
        attempt.bind([lent, hold])
        return attempt

    def replace_last_leg(self, leg: Leg, hold: CreditHold) -> None:
        """Bind another last leg, with the credit that was reserved for it, after ``AttemptLegs.drop_last``."""
        self.legs.replace_last(leg, self.task.key, self._receive, hold)

    def give_up(self, failure: Failure) -> None:
        """End the attempt with the failure of its last leg."""
        self._end_with(failure)

    def next(self, take: Take[TokenBatch] | None = None) -> Coroutine[Any, Any, TokenBatch]:
        """Return the next tokens. Raises the error that ended a leg (``failure`` then names the failed workers).

        WorkerLostError, the worker's own error; CancelledError when too many bytes are unread; DeadlineError. take: takes
        tokens that arrive while the caller waits.
        """
        return self._output.next(take)

    def _settle(self) -> None:
        """Release the workers."""
        self.move.attempt_ended()
        if self._timer:
            self._timer.cancel()
        if self._postponed:
            self._postponed.cancel()
        self.legs.release()

    def _receive(self, leg: Leg, event: Event) -> None:
        """Process an event of a leg when it arrives. Tokens that are due wait in the inbox for the client."""
        if not self.legs.is_open(leg):
            return
        if isinstance(event, KvbatonError):
            self._fail(Failure(event, leg.worker, frozenset({leg.worker})), leg)
            return
        try:
            self._take(leg, event)
        except KvbatonError as error:
            failed = frozenset({leg.worker}) if event.is_rejected else self._failed_workers(leg, error)
            self._fail(Failure(error, leg.worker, failed), leg)
            return
        if self._output.is_complete:
            self._settle()
        self._output.release()
        if self._postponed and self.legs.is_needed(self._postponed.leg):
            self._end_with(self._postponed.failure)

    def _failed_workers(self, leg: Leg, error: KvbatonError) -> frozenset[AttachedWorker]:
        """Return the workers that may be at fault for an error in an entry: both ends of an incomplete hand-over."""
        if error.kind is ErrorKind.WORKER_LOST and leg.may_hold:
            return frozenset({leg.worker})
        return self.legs.holding_workers(leg)

    def _fail(self, failure: Failure, leg: Leg) -> None:
        """End the attempt, unless an earlier leg's token, still to come, may make the leg's failure irrelevant."""
        if self._postponed:
            self._end_with(failure.after(self._postponed.failure))
        elif self.legs.is_needed(leg):
            if leg is not self.legs.last or leg.has_emitted or not self.move.target_failed(failure):
                self._end_with(failure)
        else:
            is_last_token = leg.first_index >= self.task.request.sampling.max_tokens
            self._postponed = PostponedFailure(failure, leg, self._end_with, is_last_token=is_last_token)
            if not leg.may_hold:
                self.legs.unbind(leg)

    def _end_with(self, failure: Failure) -> None:
        self._settle()
        if self.failure is None and not self._output.is_complete:
            self.failure = failure
            self._output.fail(failure.error)

    def _expire(self) -> None:
        """End the attempt at the deadline. No worker has failed, so no other attempt follows."""
        self._settle()
        self._output.fail(deadline_error(self._output.num_tokens))

    def _take(self, leg: Leg, entry: pb.TokenEntry) -> None:
        """Take an entry of a leg: its tokens, what it reports, and its end."""
        output = _read(entry, leg.worker.name)
        if output.finish_reason in _FAILED:
            leg.may_hold = False
            raise error_of(output, leg.worker.name)
        if output.token_ids and output.first_index > leg.next_index:
            raise WorkerLostError(
                f"worker {leg.worker.name} sent token {output.first_index} after token {leg.next_index - 1}"
            )
        request = self.task.request
        check_output(output, request, self.legs.end_of(leg, request.sampling.max_tokens), leg.worker.name)
        if output.handed_over:
            self.move.handed_over(self, output.first_index)
            return
        is_first = bool(output.token_ids) and not leg.has_emitted
        if is_first:
            self.legs.take_over(leg)
            if leg is self.legs.last:
                self.move.continued(output.timings)
        leg.next_index = max(leg.next_index, output.first_index + len(output.token_ids))
        self._report.add(output, has_transfer=leg is self.legs.last and leg.first_index == 1)
        if output.finish_reason:
            self._take_end(leg, output)
        self._output.add(output, entry)
        if is_first or output.finish_reason:  # no other entry changes whether a leg is over
            self.legs.unbind_finished()

    def _take_end(self, leg: Leg, output: EngineOutput) -> None:
        """Record that a worker has done its part. That ends the answer if the leg contributes to it."""
        if leg.kind.result is Result.EMBEDDING and not output.pooled:
            raise InternalError(f"worker {leg.worker.name} has ended an embedding without one")
        if leg.kind.result is not Result.NONE:
            self._output.end_with(output, leg.next_index)
        leg.done()


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
    for attempt, holds in zip(attempts, reservation.take(), strict=True):
        attempt.bind(holds)
    if lost := reservation.lost_workers:
        for attempt in attempts:
            attempt.fail_unstarted(lost)
        return
    request_id, number, _ = first.task.key
    transfers = transfers_of(first.legs, f"{request_id}.{number}")
    on_sent = reservation.begun(num_orders=len(transfers))
    for legs, transfer in zip(
        zip(*(attempt.legs for attempt in attempts), strict=True), transfers, strict=True
    ):
        request = leg_request(first.task, legs[0], num_choices=len(attempts), transfer=transfer)
        start(legs, request, on_sent)
