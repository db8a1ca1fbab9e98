"""One move of an answer from the worker that decodes it to another one."""

import asyncio
import time
from enum import StrEnum

from contract.errors import WorkerLostError
from contract.requests import HandOff, SendTransfer
from router.attached_worker import AttachedWorker
from router.attempt import Attempt
from router.attempt_legs import AttemptLegs
from router.bound_leg import Leg, start
from router.leg_requests import AttemptTask, leg_request, receiving
from router.legs import DECODE, LEG_KINDS, PREFILL, LegPlan
from router.request_run import RequestRun
from router.reservation import Reservation
from router.tasks import TaskSet


class MoveResult(StrEnum):
    """The result of a move.

    MOVED: the target has emitted a token. ENDED: the answer ended, or was cancelled, meanwhile. REFUSED: the source has not
    handed it off, and continues. NO_TARGET: no other worker could take it. REPLAYED: source or target failed, and another
    attempt computes the KV again.
    """

    MOVED = "moved"
    ENDED = "ended"
    REFUSED = "refused"
    NO_TARGET = "no_target"
    REPLAYED = "replayed"


class Move:
    """The state of a move whose target is reserved. Fulfils ``MoveEvents`` for the attempt, and for the one after it.

    over: set when the target has emitted a token, or an attempt has ended. pause_seconds: the time between the last token of
    the source and the first one of the target; None until then.
    """

    def __init__(
        self, run: RequestRun, attempt: Attempt, reservation: Reservation, order: HandOff, tasks: TaskSet
    ) -> None:
        self.over = asyncio.Event()
        self.order = order
        self.pause_seconds: float | None = None
        self._run = run
        self._attempt = attempt
        self._reservation = reservation
        self._tasks = tasks
        self._handed_over_at: float | None = None

    @property
    def is_handed_over(self) -> bool:
        """True if the source has handed the answer off, and the target was ordered to continue it."""
        return self._handed_over_at is not None

    @property
    def result(self) -> MoveResult:
        """The result, once the move is over or the source has refused."""
        if self.pause_seconds is not None:
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
        """Follow the attempt no longer. Does nothing the second time."""
        self._attempt.stay(self)

    def handed_over(self, attempt: Attempt, num_tokens: int) -> None:
        """See ``MoveEvents``. Raises WorkerLostError if a token is missing, or the target was lost meanwhile."""
        tokens = self._run.known_tokens
        source = attempt.legs.last.worker
        if len(tokens) != num_tokens:
            raise WorkerLostError(
                f"worker {source.name} has handed the request off after {num_tokens} tokens; {len(tokens)} have arrived"
            )
        if lost := self._reservation.lost_workers:
            raise WorkerLostError(f"worker {lost[0].name} was lost before the request was moved to it")
        (target,) = self._reservation.workers
        lease = _lease_of(source, num_tokens)
        leg = Leg(LegPlan(DECODE, target.name, num_tokens), LEG_KINDS[DECODE], target)
        task = AttemptTask(self._run.request, tuple(tokens[:-1]), self.order.next_attempt)
        ((hold,),) = self._reservation.take()
        self._attempt = attempt.continue_with(task, AttemptLegs([lease, leg], self._tasks), hold)
        self._run.continue_with(self._attempt)
        transfer = receiving(lease, SendTransfer(self.order.transfer_id))
        request = leg_request(task, leg, num_choices=1, transfer=transfer)
        call = leg.kind.start(target.calls, request, target.session)
        leg.call = self._tasks.spawn(start([leg], call), f"move {request.request_id} to {target.name}")
        self._reservation.begun([leg.call])
        self._handed_over_at = time.monotonic()

    def continued(self) -> None:
        """See ``MoveEvents``."""
        if self._handed_over_at is not None:
            self.pause_seconds = time.monotonic() - self._handed_over_at
            self.end()
            self.over.set()

    def attempt_ended(self) -> None:
        """See ``MoveEvents``."""
        self.end()
        self.over.set()


def _lease_of(source: AttachedWorker, num_tokens: int) -> Leg:
    """Return the leg that stands for the lease: like a prefill leg that has emitted the last of ``num_tokens``."""
    leg = Leg(LegPlan(PREFILL, source.name, num_tokens - 1), LEG_KINDS[PREFILL], source)
    leg.next_index = num_tokens
    return leg
