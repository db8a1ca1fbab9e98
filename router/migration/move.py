"""One move of an answer from the worker that decodes it to another one."""

import asyncio
import time
from enum import StrEnum

from contract.errors import WorkerLostError
from contract.outputs import RequestTimings
from contract.requests import HandOff, SendTransfer
from router.admission.reservation import Reservation
from router.attempts.attempt import Attempt
from router.attempts.attempt_legs import AttemptLegs
from router.attempts.bound_leg import Leg, start
from router.attempts.failures import CURABLE
from router.attempts.leg_outcome import Failure
from router.attempts.leg_requests import AttemptTask, leg_request, receiving
from router.attempts.request_run import RequestRun
from router.routing.legs import DECODE, LEG_KINDS, PREFILL, LegPlan
from router.telemetry.move_record import MoveRecord
from router.workers.attached_worker import AttachedWorker


class MoveResult(StrEnum):
    """The result of a move.

    MOVED: the target has emitted a token. ENDED: the answer ended, or was cancelled, meanwhile. REFUSED: the source has not
    handed it off, and continues. NO_TARGET: no other worker could take it. REPLAYED: source or targets failed, and another
    attempt computes the KV again.
    """

    MOVED = "moved"
    ENDED = "ended"
    REFUSED = "refused"
    NO_TARGET = "no_target"
    REPLAYED = "replayed"


class Move:
    """The state of a move whose target is reserved. Fulfils ``MoveEvents`` for the attempt, and for the one after it.

    over: set when the target has emitted a token, when it has failed, or when an attempt has ended. record: its times.
    failed: how the first target has failed; the attempt waits for ``continue_at`` or ``give_up`` then, and its KV is still
    lent.
    """

    def __init__(self, run: RequestRun, attempt: Attempt, reservation: Reservation, order: HandOff) -> None:
        self.over = asyncio.Event()
        self.order = order
        self.record = MoveRecord(
            order.request_id, order.choice, attempt.legs.last.worker.name, time.monotonic()
        )
        self.failed: Failure | None = None
        self._run = run
        self._attempt = attempt
        self._reservation = reservation
        self._may_try_again = True

    @property
    def is_handed_over(self) -> bool:
        """True if the source has handed the answer off, and the target was ordered to continue it."""
        return self.record.handed_over_at is not None

    @property
    def progress(self) -> tuple[int, int] | None:
        """A value that changes with each sign of life of the target; None before the hand-over."""
        target = self._attempt.legs.last.worker
        return (target.latency.num_steps, target.orders.counts.carried_out) if self.is_handed_over else None

    @property
    def result(self) -> MoveResult:
        """The result, once the move is over or the source has refused."""
        if self.record.pause_seconds is not None:
            return MoveResult.MOVED
        if not self.over.is_set():
            return MoveResult.REFUSED
        return MoveResult.REPLAYED if self._attempt.failure else MoveResult.ENDED

    def begin(self) -> None:
        """Follow the attempt that runs. From now on a cancel at the source names the next attempt."""
        self._attempt.move = self
        self._attempt.legs.last.may_be_lent_to(self.order.next_attempt)

    def refused(self) -> None:
        """Record that the source lends nothing and continues, as if it had not been asked."""
        self._attempt.legs.last.may_be_lent_to(self.order.attempt)
        self._run.return_number(self.order.next_attempt)

    def end(self) -> None:
        """Follow the attempt no longer; one that waits for another target fails. Does nothing the second time."""
        self._attempt.stay(self)
        self.give_up()

    def handed_over(self, attempt: Attempt, num_tokens: int) -> None:
        """See ``MoveEvents``. Raises WorkerLostError if a token is missing."""
        tokens = self._run.known_tokens
        source = attempt.legs.last.worker
        if len(tokens) != num_tokens:
            raise WorkerLostError(
                f"worker {source.name} has handed the request off after {num_tokens} tokens; {len(tokens)} have arrived"
            )
        (target,) = self._reservation.workers
        legs = [_lease_of(source, num_tokens), _decode_leg(target, num_tokens)]
        task = AttemptTask(self._run.request, tuple(tokens[:-1]), self.order.next_attempt)
        ((hold,),) = self._reservation.take()
        self._attempt = attempt.continue_with(task, AttemptLegs(legs), hold)
        self._run.continue_with(self._attempt)
        self.record.handed_over_at = time.monotonic()
        self.record.target_chosen(target.name, target.latency.num_steps)
        if target.gone.is_set():
            error = WorkerLostError(f"worker {target.name} was lost before the request was moved to it")
            self._attempt.legs.last.reject(error)
        else:
            self._start(self._reservation)

    def continue_at(self, reservation: Reservation) -> None:
        """Continue at another target, whose room is reserved, since the first one has failed."""
        assert self.failed is not None, "the first target has failed"
        self._run.target_failed(self._attempt, self.failed)
        self.failed = None
        (target,) = reservation.workers
        self.record.target_chosen(target.name, target.latency.num_steps)
        ((hold,),) = reservation.take()
        self._attempt.replace_last_leg(_decode_leg(target, self._attempt.legs.last.first_index), hold)
        self._start(reservation)

    def target_is_silent(self) -> None:
        """Let the target fail, which has sent nothing for so long that it may be dead."""
        leg = self._attempt.legs.last
        leg.reject(WorkerLostError(f"worker {leg.worker.name} is silent, to which the request was moved"))

    def give_up(self) -> None:
        """Let the attempt fail if it waits for another target: its KV is computed again. Does nothing otherwise."""
        failure = self.failed
        self.failed = None
        if failure:
            self._attempt.give_up(failure)

    def continued(self, timings: RequestTimings | None) -> None:
        """See ``MoveEvents``."""
        if self.is_handed_over:
            target = self._attempt.legs.last.worker
            self.record.continued(time.monotonic(), target.latency.num_steps, timings)
            self.end()
            self.over.set()

    def target_failed(self, failure: Failure, /) -> bool:
        """See ``MoveEvents``. One other target is tried, while the source lives and the error is not the request's own."""
        source = self._attempt.legs.first.worker
        if not self._may_try_again or failure.error.kind not in CURABLE or source.gone.is_set():
            return False
        self._may_try_again = False
        self.failed = failure
        self._attempt.legs.drop_last()
        self.over.set()
        return True

    def attempt_ended(self) -> None:
        """See ``MoveEvents``."""
        self.failed = None
        self.end()
        self.over.set()

    def _start(self, reservation: Reservation) -> None:
        """Order the last leg's worker to continue the answer with the KV that the source lends."""
        self.over.clear()
        (lease, leg) = self._attempt.legs
        transfer = receiving(lease, SendTransfer(self.order.transfer_id))
        request = leg_request(self._attempt.task, leg, num_choices=1, transfer=transfer)
        start([leg], request, reservation.begun(num_orders=1))


def _decode_leg(target: AttachedWorker, first_index: int) -> Leg:
    return Leg(LegPlan(DECODE, target.name, first_index), LEG_KINDS[DECODE], target)


def _lease_of(source: AttachedWorker, num_tokens: int) -> Leg:
    """Return the leg that stands for the lease: like a prefill leg that has emitted the last of ``num_tokens``."""
    leg = Leg(LegPlan(PREFILL, source.name, num_tokens - 1), LEG_KINDS[PREFILL], source)
    leg.next_index = num_tokens
    return leg
