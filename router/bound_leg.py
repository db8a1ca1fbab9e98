"""One leg of an attempt on its worker."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from contract.errors import ErrorKind, KvbatonError
from router.inbox import Event
from router.legs import LegKind, LegPlan, Placement, Result
from router.registry import AttachedWorker, LegKey, Registry

logger = logging.getLogger(__name__)

_MAYBE_ACCEPTED = (ErrorKind.WORKER_LOST, ErrorKind.DEADLINE)
"""A call that fails with one of these may have started the leg all the same."""


class Leg:
    """Owns what is known of one leg. ``key`` and ``on_event`` are set while it is bound.

    may_hold: the worker may still have the request in memory. call: starts the leg. refusal: why it was not accepted.
    """

    def __init__(self, plan: LegPlan, kind: LegKind, worker: AttachedWorker) -> None:
        self.kind = kind
        self.worker = worker
        self.first_index = plan.first_index
        self.next_index = plan.first_index
        self.may_hold = True
        self.call: asyncio.Task[None] | None = None
        self.refusal: KvbatonError | None = None
        self._is_done = False
        self._key: LegKey = ("", 0, 0)
        self._on_event: Callable[[Leg, Event], None] | None = None

    @property
    def has_spoken(self) -> bool:
        """True when a token of it has come: so it was accepted, whatever became of the call."""
        return self.next_index > self.first_index

    @property
    def is_awaited(self) -> bool:
        """True when its first token is still to come."""
        return self.kind.result is Result.TOKENS and not self.has_spoken

    @property
    def is_over(self) -> bool:
        """True when nothing that happens to the worker matters to the request any more."""
        has_result = self._is_done if self.kind.result is Result.NONE else self.has_spoken
        return has_result and not self.may_hold

    def bind(
        self, key: LegKey, on_event: "Callable[[Leg, Event], None]", num_tokens: int, tenant: str
    ) -> None:
        """Bind it to its worker; what the worker sends for it goes to ``on_event``. ``num_tokens`` count as load."""
        self._key = key
        self._on_event = on_event
        self.worker.bind(key, self._receive, num_tokens, tenant)

    def unbind(self) -> None:
        """Release the worker's credit. Does nothing the second time."""
        self.worker.unbind(self._key)

    def done(self) -> None:
        """Record that the worker has ended it, or that a later leg has taken over: the worker holds nothing."""
        self._is_done = True
        self.may_hold = False

    def refuse(self, error: KvbatonError) -> None:
        """Process that the call which starts it has failed."""
        self.may_hold = self.may_hold and (self.has_spoken or error.kind in _MAYBE_ACCEPTED)
        self.refusal = error
        self._receive(error)

    async def cancel(self) -> None:
        """Cancel it behind the acceptance, so that the worker cannot see the cancel first."""
        if self.call:
            await asyncio.wait({self.call})
        if not self.may_hold or self.worker.gone.is_set():
            return
        try:
            await self.worker.cancel(self._key)
        except KvbatonError as error:
            logger.warning("%s; the request's own deadline ends it there", error.message)

    def _receive(self, event: Event) -> None:
        if self._on_event:
            self._on_event(self, event)


def legs_of(placement: Placement, registry: Registry, kinds: Mapping[str, LegKind]) -> list[Leg]:
    """Return the legs of a placement on the workers that are attached now."""
    return [Leg(plan, kinds[plan.kind], registry.get(plan.worker)) for plan in placement.legs]


async def start(legs: Sequence[Leg], call: Coroutine[Any, Any, None]) -> None:
    """Make one call that starts all these legs of one worker. Where it fails, every leg is refused."""
    try:
        await call
    except KvbatonError as error:
        for leg in legs:
            leg.refuse(error)
