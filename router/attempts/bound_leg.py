"""One leg of an attempt on its worker."""

from collections.abc import Callable, Sequence
from functools import partial

from contract.errors import KvbatonError
from contract.requests import EngineRequest
from router.routing.legs import LegKind, LegPlan, Result
from router.tokens.inbox import Event
from router.workers.attached_worker import AttachedWorker
from router.workers.capacity import CreditHold
from router.workers.leg_routes import LegKey
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
        self.worker.bind(key, self._receive)

    def unbind(self) -> None:
        """Receive nothing more, and release the worker's credit. Does nothing the second time."""
        self.worker.unbind(self._keys[0])
        self._receive = _drop  # a cycle of references would wait for the search for garbage
        if self._hold:
            self._hold.release()

    def may_be_lent_to(self, attempt: int) -> None:
        """Record that the worker may hold a lease for this later attempt, which a cancel has to end too."""
        key = self._keys[0]
        (request_id, _, choice) = key
        self._keys = (key, (request_id, attempt, choice))

    def handed_off(self) -> CreditHold:
        """Record that the worker has ended it and lends its KV. Return the worker's credit, which another leg releases."""
        assert self._hold is not None, "the leg is not bound"
        hold = self._hold
        self._hold = None
        self.done()
        return hold

    def done(self) -> None:
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

    leg.worker.orders.start(leg.kind.order(request), reject, on_sent)
