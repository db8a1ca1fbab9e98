"""The legs of one attempt, and how one takes over from the other."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

from contract.identity import Role
from router.admission.reservation import Reservation
from router.attempts.bound_leg import Leg
from router.routing.legs import LegKind, Transfer
from router.tokens.inbox import Event
from router.workers.attached_worker import AttachedWorker
from router.workers.capacity import CreditHold
from router.workers.leg_routes import LegKey


class AttemptLegs:
    """Owns the legs of one attempt, in the order in which one takes over from the other.

    first: the leg that computes the prompt. last: the leg that ends the attempt. A leg is open from ``bind`` until it is
    unbound.
    """

    def __init__(self, legs: Sequence[Leg]) -> None:
        self._legs = tuple(legs)
        self.first = self._legs[0]
        self.last = self._legs[-1]
        self._open: list[Leg] = []

    @classmethod
    def of(cls, reservation: Reservation, kinds: Mapping[str, LegKind]) -> "AttemptLegs":
        """Make a leg for each leg plan of a reservation."""
        planned = zip(reservation.placement.legs, reservation.workers, strict=True)
        return cls([Leg(plan, kinds[plan.kind], worker) for plan, worker in planned])

    def __iter__(self) -> Iterator[Leg]:
        return iter(self._legs)

    @property
    def hand_over(self) -> tuple[AttachedWorker, AttachedWorker] | None:
        """The workers that send and receive the prompt's KV; None if no KV is handed over."""
        for sender, receiver in pairwise(self._legs):
            if receiver.kind.transfer is Transfer.RECEIVE:
                return sender.worker, receiver.worker
        return None

    @property
    def computed_by_decoder(self) -> str | None:
        """The id of the decode worker that computes the prompt itself; None if another one does."""
        worker = self.last.worker
        return worker.name if worker.role is Role.DECODE and not self.hand_over else None

    def bind(self, key: LegKey, on_event: Callable[[Leg, Event], None], holds: Sequence[CreditHold]) -> None:
        """Bind every leg to its worker, with the credit that was reserved there."""
        self._open = list(self._legs)
        for leg, hold in zip(self._legs, holds, strict=True):
            leg.bind(key, on_event, hold)

    def is_open(self, leg: Leg) -> bool:
        """Return True if the leg is bound to its worker."""
        return leg in self._open

    def is_needed(self, leg: Leg) -> bool:
        """Return True if the answer cannot end before this leg: no token of an earlier leg is still to come."""
        return not any(each.is_awaited for each in self._before(leg))

    def end_of(self, leg: Leg, max_tokens: int) -> int:
        """Return how many tokens an answer of ``max_tokens`` at most may have when this leg ends."""
        return max_tokens if leg is self.last else self._legs[self._legs.index(leg) + 1].first_index

    def take_over(self, leg: Leg) -> None:
        """Record that ``leg`` emits its first token: it has read what earlier legs computed, and their lease has ended."""
        for earlier in self._before(leg):
            earlier.done()

    def drop_last(self) -> None:
        """Release the last leg, which has failed, and cancel it on a worker that may still hold it."""
        if self.last in self._open:
            self._open.remove(self.last)
            self.last.unbind()
            self.last.cancel()

    def replace_last(
        self, leg: Leg, key: LegKey, on_event: Callable[[Leg, Event], None], hold: CreditHold
    ) -> None:
        """Bind another last leg, after ``drop_last``."""
        self._legs = (*self._legs[:-1], leg)
        self.last = leg
        self._open.append(leg)
        leg.bind(key, on_event, hold)

    def unbind_finished(self) -> None:
        """Release the legs whose workers have no more work for them, however slowly the client reads."""
        for leg in tuple(self._open):
            if leg.is_over:
                self.unbind(leg)

    def unbind(self, leg: Leg) -> None:
        """Release an open leg whose worker holds nothing of it."""
        self._open.remove(leg)
        leg.unbind()

    def holding_workers(self, leg: Leg) -> frozenset[AttachedWorker]:
        """Return the workers that may hold the request, and the one of ``leg``."""
        return frozenset(each.worker for each in self._open if each.may_hold or each is leg)

    def release(self) -> None:
        """Release every leg, and cancel it on a worker that may still hold it. Does nothing the second time."""
        legs = self._open
        self._open = []
        for leg in legs:
            leg.unbind()
            leg.cancel()

    def _before(self, leg: Leg) -> tuple[Leg, ...]:
        return self._legs[: self._legs.index(leg)]
