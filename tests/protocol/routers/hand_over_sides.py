"""Workers that hand KV over and have several routers, and such a router: the sides of both kinds of worlds together."""

from dataclasses import dataclass

from contract.identity import Role
from contract.membership import Credit
from router.migration import migrator
from router.routing.legs import AGGREGATED, Placement, place_legs
from router.routing.policy import decodes_no_more
from router.workers.attached_worker import AttachedWorker
from tests.protocol.decode_side import DecodeSide
from tests.protocol.happening import look
from tests.protocol.prefill_side import PrefillSide
from tests.protocol.router_request import RouterRequest
from tests.protocol.routers.router_side import OneRouter
from tests.protocol.routers.scenario import RoutersScenario
from tests.protocol.routers.worker_side import SessionsSide
from tests.protocol.sink import Sink
from tests.protocol.world import Action


@dataclass(frozen=True)
class HandOverScenario(RoutersScenario):
    """Workers that lend (P), workers that fetch (D), and routers that share their credit.

    fetching_credit: legs that a worker which fetches takes at a time. With ``num_moves`` an answer begins on a worker that
    lends, and is moved while it is decoded; without it prompts are handed over. moves_when_drained: answers are moved only
    from a worker that is to decode no more, and at any moment otherwise. struck: how the names of those begin that a fault
    may strike. reads_at_once, frames_at_once: the data threads
    act, and frames between workers arrive, before anything else happens; ``test_exploration.py`` explores their orders.
    """

    num_lending: int = 1
    num_fetching: int = 1
    fetching_credit: int = 2
    is_settled: bool = True
    routers_return: bool = False
    moves_when_drained: bool = False
    struck: str = ""
    reads_at_once: bool = True
    frames_at_once: bool = True

    @property
    def worker_names(self) -> list[str]:
        """The names of all workers."""
        lending = [f"P{index}" for index in range(self.num_lending)]
        return lending + [f"D{index}" for index in range(self.num_fetching)]

    def credit_of(self, worker: str) -> int:
        """Return how many legs a worker takes at a time."""
        return self.credit if worker.startswith("P") else self.fetching_credit

    @property
    def is_planned(self) -> bool:
        """True if nothing fails: workers only drain, and serve again."""
        return set(self.faults) <= {"divide", "drain"}


class _TransfersSide(SessionsSide):
    """A worker that lends or fetches."""

    def own_actions(self) -> tuple[Action, ...]:
        """Return what this worker may do by itself, besides its steps."""
        assert isinstance(self, PrefillSide | DecodeSide), "it lends or fetches"
        return tuple(action for action in look(self) if action[0] != "step")


class LendingSide(_TransfersSide, PrefillSide):
    """A worker that lends."""

    def __init__(self, scenario: HandOverScenario, sink: Sink, boot: str) -> None:
        PrefillSide.__init__(self, scenario, sink, boot)
        self.begin_sessions(Role.PREFILL)

    def carry_out(self) -> None:
        """Carry out what the sessions ask of the engine, and the effects of the transfers."""
        SessionsSide.carry_out(self)
        PrefillSide.carry_out(self)


class FetchingSide(_TransfersSide, DecodeSide):
    """A worker that fetches."""

    def __init__(self, scenario: HandOverScenario, sink: Sink, boot: str) -> None:
        DecodeSide.__init__(self, scenario, sink, boot)
        self.begin_sessions(Role.DECODE)

    def carry_out(self) -> None:
        """Carry out what the sessions ask of the engine, and the effects of the transfers."""
        SessionsSide.carry_out(self)
        DecodeSide.carry_out(self)


class HandOverRouter(OneRouter):
    """A router of such workers."""

    scenario: HandOverScenario

    def role_of(self, worker: str) -> Role:
        """Return the role in which a worker registers."""
        return Role.PREFILL if worker.startswith("P") else Role.DECODE

    def take_credit(self, worker: str, credit: Credit) -> None:
        """Take a credit, and answer it; legs that have not begun leave a draining worker."""
        super().take_credit(worker, credit)
        if not credit.is_draining:
            self.draining.pop(worker, None)
        elif worker not in self.draining:
            self.drain(worker)

    def num_moves_from(self, source: AttachedWorker) -> int:
        """Return how many answers are being moved away from a worker."""
        return sum(_source_of(request) == source.session for request in self.requests)

    def _may_be_moved(self, request: RouterRequest) -> bool:
        """See ``Migrator.can_move`` and ``evacuation``; an answer of one token may be moved here too."""
        num_left = self.scenario.answers[request.number] - len(request.delivered)
        if num_left < migrator._MIN_TOKENS or not super()._may_be_moved(request):
            return False
        assert request.decode is not None
        source = self.attached[request.decode.worker]
        may_leave = decodes_no_more(source.role, source.capacity.credit)
        return may_leave or not self.scenario.moves_when_drained

    def _first_placement(self, request: RouterRequest) -> Placement | None:
        names = [name for name in sorted(self.workers) if name.startswith("P")]
        views = [self._view(name) for name in names]
        free = [view.worker_id for view in views if view.num_requests < view.max_requests]
        return place_legs((AGGREGATED, free[0])) if free else None


def _source_of(request: RouterRequest) -> str | None:
    """Return the session of the worker that an answer is being moved away from; see ``Migrator``."""
    if request.next_attempt is not None and request.decode:
        return request.decode.boot
    is_moved = request.rungs[-1:] and request.rungs[-1].startswith("moved")
    is_on_its_way = is_moved and request.decode is not None and not request.decode.has_spoken
    return request.prefill.boot if is_on_its_way and request.prefill else None
