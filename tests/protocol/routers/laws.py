"""The laws of several routers, which are checked after every action."""

from collections.abc import Callable

from tests.protocol.routers.router_side import RouterLook
from tests.protocol.routers.scenario import RoutersScenario
from tests.protocol.routers.worker_side import Leg, WorkerLook
from tests.protocol.routers.world import PartState, RoutersWorld, Session
from tests.protocol.sink import LawBrokenError


def check(
    scenario: RoutersScenario,
    world: RoutersWorld,
    look_at_router: Callable[[PartState], RouterLook],
    look_at_worker: Callable[[PartState], WorkerLook],
) -> None:
    """Check the credit of every worker, and that each of its legs has a router that waits for it. Raises LawBrokenError."""
    routers = {one.boot: look_at_router(one) for one in world.routers if one.state is not None}
    for worker in world.workers:
        if worker.state is None:
            continue
        known = {one.name: one for one in world.sessions if one.worker == worker.boot and one.knows_worker}
        both = {name: one for name, one in known.items() if one.knows_router}
        num_bound = sum(routers[one.router].held[name] for name, one in both.items())
        if num_bound > (credit := scenario.credit_of(worker.name)):
            raise LawBrokenError(f"{worker.boot}: {num_bound} legs are bound, with credit for {credit}")
        for leg in look_at_worker(worker).legs:
            session = both.get(leg.session or "")
            if leg.session not in known:
                raise LawBrokenError(f"{worker.boot} computes {leg}, whose session is over")
            is_bound = session is None or leg in routers[session.router].bound
            is_ending = session is not None and session.is_cut
            if not (is_bound or is_ending or (session and _is_cancelled(session, leg))):
                raise LawBrokenError(f"{worker.boot} computes {leg}, for which no router waits")


def _is_cancelled(session: Session, leg: Leg) -> bool:
    """Return True if a cancel of the leg is on its way."""
    return any(
        order.kind == "cancel" and order.number == leg.number and order.attempt >= leg.attempt
        for order in session.orders
    )
