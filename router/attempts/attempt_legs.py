"""The legs of one attempt, and how one takes over from the other."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise

from contract.errors import KvbatonError
from contract.requests import EngineRequest
from router.admission.reservation import Reservation
from router.routing.legs import LegKind, LegPlan, Result, Transfer
from router.tokens.inbox import Event
from router.workers.attached_worker import AttachedWorker, LegKey
from router.workers.capacity import CreditHold
from wire.legs import cancel_to_proto


def _drop(_event: Event) -> None:
    pass


class Leg:
    """The state of one leg.

    next_index: index of the token that it emits next. may_hold: the worker may still have the request in memory.
    """

    def __init__(self, plan: LegPlan, kind: LegKind, worker: AttachedWorker) -> None:
        self.kind = kind
        self.worker = worker
        self.first_index = plan.first_index
        self.next_index = plan.first_index
        self.may_hold = True
        self._is_done = False
        # They differ from a hand-off on: the worker's entries name this attempt, its lease the next one.
        self._keys: tuple[LegKey, LegKey] = (("", 0, 0), ("", 0, 0))
        """The key of its entries, and the one by which it is cancelled."""
        self._hold: CreditHold | None = None
        self._receive: Callable[[Event], None] = _drop

    @property
    def has_emitted(self) -> bool:
        """True if a token of it has arrived. It was accepted then, even if the call has failed."""
        return self.next_index > self.first_index

    @property
    def is_awaited(self) -> bool:
        """True while its first token is still to come."""
        return self.kind.result is Result.TOKENS and not self.has_emitted

    @property
    def is_over(self) -> bool:
        """True if nothing that happens to the worker matters to the request any more."""
        if self.may_hold:
            return False
        return self._is_done if self.kind.result is Result.NONE else self.has_emitted

    def bind(self, key: LegKey, on_event: "Callable[[Leg, Event], None]", hold: CreditHold) -> None:
        """Pass what the worker sends for it to ``on_event``. The leg releases ``hold`` when it is unbound."""
        self._keys = (key, key)
        self._receive = partial(on_event, self)
        self._hold = hold
        self.worker.routes.bind(key, self._receive)

    def unbind(self) -> None:
        """Receive nothing more, and release the worker's credit. Does nothing the second time."""
        self.worker.routes.unbind(self._keys[0])
        self._receive = _drop  # a cycle of references would wait for the search for garbage
        if self._hold:
            self._hold.release()

    def may_be_lent_to(self, attempt: int) -> None:
        """Record that the worker may hold a lease for this later attempt, which a cancel has to end too."""
        key = self._keys[0]
        (request_id, _, choice) = key
        self._keys = (key, (request_id, attempt, choice))

    def detach_hold(self) -> CreditHold:
        """Record that the worker has ended it and lends its KV. Return the worker's credit, which another leg releases."""
        assert self._hold is not None, "the leg is not bound"
        hold = self._hold
        self._hold = None
        self.on_ended()
        return hold

    def on_ended(self) -> None:
        """Record that the worker has ended it, or that a later leg has taken over: the worker holds nothing."""
        self._is_done = True
        self.may_hold = False

    def reject(self, error: KvbatonError) -> None:
        """Process that it was not accepted in time, or that the worker is lost. Nothing follows if it has emitted tokens."""
        if not self.has_emitted:
            self._receive(error)

    def cancel(self) -> None:
        """Cancel it on the worker if that may still hold it."""
        if self.may_hold and not self.worker.gone.is_set():
            self.worker.orders.cancel(cancel_to_proto(*self._keys[1]))


def start(legs: Sequence[Leg], request: EngineRequest, on_sent: Callable[[], None]) -> None:
    """Order the one worker of all these legs to start them. on_sent: called when the order was sent."""
    leg = legs[0]

    def reject(error: KvbatonError) -> None:
        for each in legs:
            each.reject(error)

    leg.worker.orders.start(partial(leg.kind.write, request), reject, on_sent)


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
        self._binding: tuple[LegKey, Callable[[Leg, Event], None]] | None = None
        """The key by which the legs are bound, and what receives their events."""

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

    def bind(self, key: LegKey, on_event: Callable[[Leg, Event], None], holds: Sequence[CreditHold]) -> None:
        """Bind every leg to its worker, with the credit that was reserved there."""
        self._binding = key, on_event
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

    def end_earlier(self, leg: Leg) -> None:
        """Record that ``leg`` emits its first token: it has read what earlier legs computed, and their lease has ended."""
        for earlier in self._before(leg):
            earlier.on_ended()

    def drop_last(self) -> None:
        """Release the last leg, which has failed, and cancel it on a worker that may still hold it."""
        if self.last in self._open:
            self._open.remove(self.last)
            self.last.unbind()
            self.last.cancel()

    def replace_last(self, leg: Leg, hold: CreditHold) -> None:
        """Bind another last leg, after ``drop_last``."""
        assert self._binding is not None, "the attempt goes on"
        self._legs = (*self._legs[:-1], leg)
        self.last = leg
        self._open.append(leg)
        leg.bind(*self._binding, hold)

    def unbind_finished(self) -> None:
        """Release the legs whose workers have no more work for them, however slowly the client reads."""
        for leg in tuple(self._open):
            if leg.is_over:
                self._open.remove(leg)
                leg.unbind()

    def unbind(self, leg: Leg) -> None:
        """Release an open leg whose worker holds nothing of it."""
        self._open.remove(leg)
        leg.unbind()

    def release(self) -> None:
        """Release every leg, and cancel it on a worker that may still hold it. Does nothing the second time."""
        legs = self._open
        self._open = []
        self._binding = None  # a cycle of references would wait for the search for garbage
        for leg in legs:
            leg.unbind()  # first: what the worker still sends, its answer to the cancel too, is for no leg
            leg.cancel()

    def _before(self, leg: Leg) -> tuple[Leg, ...]:
        return self._legs[: self._legs.index(leg)]
