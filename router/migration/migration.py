"""One migration: an answer moves from the worker that decodes it, the source, to another one, the target.

                        ┌── the second target has room ───┐
                        v                                 │
    HANDING_OFF ────> FETCHING ─── the target failed ──> SEEKING
     │     │            │   │      for the first time     │
     v     │            v   │                             │
    REFUSED│          MOVED │                             │
           └────────────────┴─────────────────────────────┴──> ENDED, REPLAYED

Before HANDING_OFF, room is reserved and the target prepares (``migrator.py``). That changes nothing for the answer, and has
two results only: NO_TARGET, and ENDED. In HANDING_OFF the attempt at the source runs; the hand-off swaps it for another one,
which fetches in FETCHING, keeps what is lent in SEEKING, and simply goes on after MOVED.
"""

import asyncio
import time
from enum import StrEnum

from contract.errors import KvbatonError, NotFoundError, WorkerLostError
from contract.outputs import RequestTimings
from contract.requests import HandOff, SendTransfer
from router.admission.reservation import Reservation
from router.attempts.attempt import Attempt
from router.attempts.attempt_legs import AttemptLegs, Leg, start
from router.attempts.failures import CURABLE
from router.attempts.leg_outcome import Failure
from router.attempts.leg_requests import AttemptTask, leg_request, receiving
from router.attempts.request_run import RequestRun
from router.routing.legs import DECODE, LEG_KINDS, PREFILL, LegPlan
from router.telemetry.migration_record import MigrationRecord
from router.workers.attached_worker import AttachedWorker


class MigrationState(StrEnum):
    """The state of a migration, the last ones of which are its results.

    HANDING_OFF: the source decodes the answer, and is ordered to hand it off; room at a target is reserved. FETCHING: the
    source lends the KV, and a target is ordered to continue the answer. SEEKING: that target has failed; the KV is still
    lent, and room at a second target is awaited.

    MOVED: the target has emitted a token. ENDED: the answer ended, or was cancelled, meanwhile. REFUSED: the source has
    not handed it off, and continues. NO_TARGET: no other worker could take it, and no order was sent. REPLAYED: source or
    targets failed, and another attempt computes the KV again.
    """

    HANDING_OFF = "handing_off"
    FETCHING = "fetching"
    SEEKING = "seeking"
    MOVED = "moved"
    ENDED = "ended"
    REFUSED = "refused"
    NO_TARGET = "no_target"
    REPLAYED = "replayed"


_S = MigrationState
_TRANSITIONS = {
    _S.HANDING_OFF: frozenset({_S.FETCHING, _S.REFUSED, _S.ENDED, _S.REPLAYED}),
    _S.FETCHING: frozenset({_S.MOVED, _S.SEEKING, _S.ENDED, _S.REPLAYED}),
    _S.SEEKING: frozenset({_S.FETCHING, _S.ENDED, _S.REPLAYED}),
}
"""The states that may follow each one. A state that is no key is a result: nothing follows it."""


class Migration:
    """One migration whose target is reserved. Fulfils ``RunMigration`` for the attempt that runs.

    state: see the top. stopped: set while no worker is to do anything for it, in SEEKING and when it is over. over: set when
    it has a result. record: its times. failed: how the first target has failed, in SEEKING.
    """

    def __init__(self, run: RequestRun, attempt: Attempt, reservation: Reservation, order: HandOff) -> None:
        """Follow the attempt that runs. From now on a cancel at the source names the next attempt."""
        self.state = MigrationState.HANDING_OFF
        self.stopped = asyncio.Event()
        self.over = asyncio.Event()
        self.order = order
        self.record = MigrationRecord(
            order.request_id, order.choice, attempt.legs.last.worker.name, time.monotonic()
        )
        self.failed: Failure | None = None
        self._run = run
        self._attempt = attempt
        self._reservation = reservation
        run.current.migration = self
        self._attempt.legs.last.may_be_lent_to(self.order.next_attempt)

    @property
    def is_handed_off(self) -> bool:
        """True if the source has handed the answer off, and a target was chosen to continue it."""
        return self.record.handed_off_at is not None

    @property
    def progress(self) -> tuple[int, int] | None:
        """A value that changes with each sign of life of the target; None before the hand-off."""
        target = self._attempt.legs.last.worker
        return (target.latency.num_steps, target.orders.counts.carried_out) if self.is_handed_off else None

    def on_refused(self, error: KvbatonError) -> None:
        """Process that the source lends nothing, as if it had not been asked: it continues, or has ended the answer."""
        self._attempt.legs.last.may_be_lent_to(self.order.attempt)
        self._run.current.return_number(self.order.next_attempt)
        if not self.over.is_set():  # the attempt may have ended while the refusal was on its way
            is_gone = isinstance(error, NotFoundError)
            self._enter(MigrationState.ENDED if is_gone else MigrationState.REFUSED)

    def end(self) -> None:
        """Follow the attempt no longer, in whatever state. An answer on its way continues at the target that has it."""
        self.give_up()
        if self.state is MigrationState.HANDING_OFF:
            self._enter(MigrationState.REFUSED)
        self._leave()

    def on_source_ended(self, num_tokens: int) -> None:
        """See ``RunMigration``. Raises WorkerLostError if a token is missing."""
        tokens = self._run.known_tokens
        source = self._attempt.legs.last.worker
        if len(tokens) != num_tokens:
            raise WorkerLostError(
                f"worker {source.name} has handed the request off after {num_tokens} tokens; {len(tokens)} have arrived"
            )
        (target,) = self._reservation.workers
        legs = [_lease_of(source, num_tokens), _decode_leg(target, num_tokens)]
        task = AttemptTask(self._run.request, tuple(tokens[:-1]), self.order.next_attempt)
        ((hold,),) = self._reservation.detach_holds()
        self._attempt = self._run.current.swap(task, AttemptLegs(legs), hold)
        self.record.handed_off_at = time.monotonic()
        self.record.target_chosen(target.name, target.latency.num_steps)
        self._enter(MigrationState.FETCHING)
        if target.gone.is_set():
            error = WorkerLostError(f"worker {target.name} was lost before the request was moved to it")
            self._attempt.legs.last.reject(error)
        else:
            self._start(self._reservation)

    def continue_at(self, reservation: Reservation) -> None:
        """Continue at another target, whose room is reserved, since the first one has failed."""
        assert self.failed is not None, "the first target has failed"
        self._run.failures.note_target(self._attempt, self.failed)
        self.failed = None
        (target,) = reservation.workers
        self.record.target_chosen(target.name, target.latency.num_steps)
        ((hold,),) = reservation.detach_holds()
        self._attempt.legs.replace_last(_decode_leg(target, self._attempt.legs.last.first_index), hold)
        self._enter(MigrationState.FETCHING)
        self._start(reservation)

    def target_is_silent(self) -> None:
        """Let the target fail, which has sent nothing for so long that it may be dead."""
        leg = self._attempt.legs.last
        leg.reject(WorkerLostError(f"worker {leg.worker.name} is silent, to which the request was moved"))

    def give_up(self) -> None:
        """Let the attempt fail if it waits for another target: its KV is computed again. Does nothing otherwise."""
        if self.failed:
            self._attempt.fail(self.failed)

    def on_target_began(self, timings: RequestTimings | None) -> None:
        """See ``RunMigration``."""
        target = self._attempt.legs.last.worker
        self.record.on_continued(time.monotonic(), target.latency.num_steps, timings)
        self._enter(MigrationState.MOVED)

    def on_target_failed(self, failure: Failure) -> bool:
        """See ``RunMigration``. One other target is tried, while the source lives and the error is not the request's own."""
        source = self._attempt.legs.first.worker
        is_first = len(self.record.targets) == 1
        if not is_first or failure.error.kind not in CURABLE or source.gone.is_set():
            return False
        self.failed = failure
        self._attempt.legs.drop_last()
        self._enter(MigrationState.SEEKING)
        return True

    def on_attempt_ended(self, failure: Failure | None) -> None:
        """See ``RunMigration``."""
        self.failed = None
        self._enter(MigrationState.REPLAYED if failure else MigrationState.ENDED)

    def _enter(self, state: MigrationState) -> None:
        """Change the state: the only place that does."""
        assert state in _TRANSITIONS[self.state], f"a migration is never {state} after {self.state}"
        self.state = state
        if state is MigrationState.FETCHING:
            self.stopped.clear()
            return
        self.stopped.set()
        if state not in _TRANSITIONS:
            self.over.set()
            self._leave()

    def _leave(self) -> None:
        if self._run.current.migration is self:
            self._run.current.migration = None

    def _start(self, reservation: Reservation) -> None:
        """Order the last leg's worker to continue the answer with the KV that the source lends."""
        (lease, leg) = self._attempt.legs
        transfer = receiving(lease, SendTransfer(self.order.transfer_id))
        request = leg_request(self._attempt.task, leg, num_choices=1, transfer=transfer)
        start([leg], request, reservation.begin(num_orders=1))


def _decode_leg(target: AttachedWorker, first_index: int) -> Leg:
    return Leg(LegPlan(DECODE, target.name, first_index), LEG_KINDS[DECODE], target)


def _lease_of(source: AttachedWorker, num_tokens: int) -> Leg:
    """Return the leg that stands for the lease: like a prefill leg that has emitted the last of ``num_tokens``."""
    leg = Leg(LegPlan(PREFILL, source.name, num_tokens - 1), LEG_KINDS[PREFILL], source)
    leg.next_index = num_tokens
    return leg
