"""The actions that are possible in a world of several routers, and their results."""

from collections.abc import Iterator
from typing import Any

from tests.protocol.explorer import Explorer
from tests.protocol.machine import Machine
from tests.protocol.router_request import RouterRequest
from tests.protocol.routers.laws import check
from tests.protocol.routers.router_side import ELSEWHERE, OneRouter, RouterLook
from tests.protocol.routers.scenario import RoutersScenario
from tests.protocol.routers.worker_side import SessionsSide, WorkerLook, WorkerSide
from tests.protocol.routers.world import (
    PartState,
    RoutersWorld,
    Session,
    is_known,
    remembered,
)
from tests.protocol.scenario import Scenario
from tests.protocol.sink import Sink
from tests.protocol.world import Action, posted, with_item

_SENT = ("to_router", "to_worker", "order")
"""The effects that put a frame or an order into a queue of a session."""
FAULTS = ("crash", "crash_router", "cut", "slow", "leave", "divide")


class RoutersRules:
    """The actions that are possible in a world of this scenario, and their results. Owns the machines."""

    def __init__(self, scenario: RoutersScenario) -> None:
        self.scenario = scenario
        self.sink = Sink()
        self.routers: Machine[OneRouter] = Machine()
        self.workers: Machine[WorkerSide] = Machine()

    @property
    def machines(self) -> list[Machine[Any]]:
        """The machines of all parts."""
        return [self.routers, self.workers]

    def begin(self) -> RoutersWorld:
        """Return the first world: every worker is attached to every router, and the credits are on their way."""
        scenario = self.scenario
        routers = [
            self._boot_router(PartState(f"R{index}", 0, None)) for index in range(scenario.num_routers)
        ]
        workers = [self._boot_worker(PartState(name, 0, None)) for name in scenario.worker_names]
        world = RoutersWorld(scenario.num_faults, tuple(routers), tuple(workers))
        for router in range(len(routers)):
            for worker in range(len(workers)):
                world = self._attach(world, router, worker)
        while scenario.is_settled and (
            frames := [each for each in self._traffic(world) if each[0] not in ("deliver", "order")]
        ):
            world = self.apply(world, frames[0])
        return world

    def progress(self, world: RoutersWorld) -> Iterator[Action]:
        """Return the actions that happen sooner or later without a fault.

        A call to a worker that is gone arrives at once, since that changes nothing.
        """
        living = {worker.boot for worker in world.workers if worker.state is not None}
        for index, call in enumerate(world.calls):
            if call.worker not in living:
                return iter((("deliver", index),))
        actions = [*self._traffic(world), *self._lives(world)]
        return iter(actions) if actions else self._divisions(world)

    def faults(self, world: RoutersWorld) -> Iterator[Action]:
        """Return the actions of the environment; each costs one fault."""
        if world.num_faults:
            for name in self.scenario.faults:
                yield from ((name, *place) for place in self._places(world, name))

    def time(self, world: RoutersWorld) -> Iterator[Action]:
        """Return the deadlines that pass when nothing else happens."""
        for index, router in enumerate(world.routers):
            for number in self.look_at_router(router).unended if router.state is not None else ():
                yield "overdue", index, number

    def what_is_left(self, world: RoutersWorld) -> list[str]:
        """Return what must not exist in a world where nothing more happens."""
        left = []
        for router in world.routers:
            if router.state is not None:
                look = self.look_at_router(router)
                left += [f"{router.boot}: request {number} has not ended" for number in look.unended]
                left += [f"{router.boot} holds credit of {name}" for name, held in look.held.items() if held]
        for worker in world.workers:
            if worker.state is not None:
                held = self.machine_of(worker).states[worker.state].what_is_held()
                left += [f"{worker.boot}: {what}" for what in held]
                if self.look_at_worker(worker).num_accepted:
                    left.append(f"{worker.boot} has accepted a leg that never ends")
        return left + self._lost_credit(world)

    def endings(self, world: RoutersWorld) -> Iterator[tuple[str | None, tuple[str, ...]]]:
        """Return how the requests of living routers have ended: the router first, then the attempts that they took."""
        for router in world.routers:
            if router.state is not None:
                own = [one for one in self._requests(router) if one.ended != ELSEWHERE]
                yield from ((one.ended, (router.boot, *one.rungs)) for one in own)

    def apply(self, world: RoutersWorld, action: Action, *, is_fault: bool = False) -> RoutersWorld:
        """Return the world after an action. Raises LawBrokenError."""
        after: RoutersWorld = getattr(self, f"_{action[0]}")(world, *action[1:])
        check(self.scenario, after, self.look_at_router, self.look_at_worker)
        return after._replace(num_faults=after.num_faults - 1) if is_fault else after

    def look_at_router(self, router: PartState) -> RouterLook:
        """Return what the rules read of a living router."""
        assert router.state is not None
        look: RouterLook = self.routers.view(router.state, OneRouter.look)
        return look

    def look_at_worker(self, worker: PartState) -> WorkerLook:
        """Return what the rules read of a living worker."""
        assert worker.state is not None
        look: WorkerLook = self.machine_of(worker).view(worker.state, SessionsSide.look)
        return look

    def machine_of(self, worker: PartState) -> Machine[Any]:
        """Return the machine with this worker's states."""
        return self.workers

    def make_router(self, boot: str) -> OneRouter:
        """Return a router that has just started."""
        return OneRouter(self.scenario, self.sink, boot)

    def make_worker(self, worker: PartState) -> SessionsSide:
        """Return a worker that has just started."""
        return WorkerSide(self.scenario, self.sink, worker.boot)

    def _traffic(self, world: RoutersWorld) -> Iterator[Action]:
        yield from (("deliver", index) for index in range(len(world.calls)))
        for index, session in enumerate(world.sessions):
            if session.is_cut:
                yield from (("detect", index, side) for side in (True, False) if session[6 if side else 7])
                continue
            if session.to_router:
                yield "to_router", index
            if session.to_worker:
                yield "to_worker", index
            yield from (("order", index, place) for place in session.next_orders())

    def _lives(self, world: RoutersWorld) -> Iterator[Action]:
        for index, worker in enumerate(world.workers):
            if worker.state is None:
                yield "restart", index
                continue
            if self.look_at_worker(worker).needs_step:
                yield "step", index
        yield from self._attachable(world)
        for index, router in enumerate(world.routers):
            if router.state is None and self.scenario.routers_return:
                yield "restart_router", index

    def _attachable(self, world: RoutersWorld) -> Iterator[Action]:
        for index, worker in enumerate(world.workers):
            for place, router in enumerate(world.routers):
                are_alive = worker.state is not None and router.state is not None
                if are_alive and not is_known(world, router, worker):
                    yield "attach", place, index

    def _divisions(self, world: RoutersWorld) -> Iterator[Action]:
        """Return the next division of all credit, where a request waits for it, or some of it is not given out."""
        is_waiting = any(
            self.look_at_router(router).unended for router in world.routers if router.state is not None
        )
        if is_waiting or self._lost_credit(world):
            yield ("divide_all",)

    def _lost_credit(self, world: RoutersWorld) -> list[str]:
        limits = dict.fromkeys((worker.boot for worker in world.workers if worker.state is not None), 0)
        for router in world.routers:
            if router.state is not None:
                for name, limit in self.look_at_router(router).limits.items():
                    worker = name.partition(">")[2].partition("/")[0]
                    if worker in limits:
                        limits[worker] += limit
        credits = {boot: self.scenario.credit_of(boot) for boot in limits}
        return [f"{boot} gives {num} of its credit" for boot, num in limits.items() if num != credits[boot]]

    def _places(self, world: RoutersWorld, fault: str) -> Iterator[tuple[int, ...]]:
        living = [index for index, one in enumerate(world.workers) if one.state is not None]
        routers = [index for index, one in enumerate(world.routers) if one.state is not None]
        match fault:
            case "crash" | "divide":
                yield from ((index,) for index in living)
            case "crash_router":
                yield from ((index,) for index in routers)
            case "cut":
                yield from ((index,) for index, one in enumerate(world.sessions) if not one.is_cut)
            case "slow":
                for index, one in enumerate(world.sessions):
                    orders = enumerate(one.orders)
                    yield from ((index, at) for at, it in orders if it.kind == "decode" and not it.is_late)
            case "leave":
                for index in routers:
                    unended = self.look_at_router(world.routers[index]).unended
                    yield from ((index, number) for number in unended)

    def _requests(self, router: PartState) -> list[RouterRequest]:
        return self.routers.states[router.state or 0].requests

    def _boot_router(self, router: PartState) -> PartState:
        router = router._replace(num_boots=router.num_boots + 1)
        return router._replace(state=self.routers.number(self.make_router(router.boot)))

    def _boot_worker(self, worker: PartState) -> PartState:
        worker = worker._replace(num_boots=worker.num_boots + 1)
        return worker._replace(state=self.machine_of(worker).number(self.make_worker(worker)))

    def _restart(self, world: RoutersWorld, index: int) -> RoutersWorld:
        return world._replace(
            workers=with_item(world.workers, index, self._boot_worker(world.workers[index]))
        )

    def _restart_router(self, world: RoutersWorld, index: int) -> RoutersWorld:
        return world._replace(
            routers=with_item(world.routers, index, self._boot_router(world.routers[index]))
        )

    def _attach(self, world: RoutersWorld, router: int, worker: int) -> RoutersWorld:
        """Open a session. The router has lost an older one of the same process then."""
        ends = world.routers[router].boot, world.workers[worker].boot
        number = world.num_sessions + 1
        name = f"{ends[0]}>{ends[1]}/{number}"
        sessions = [
            one._replace(knows_router=False) if (one.router, one.worker) == ends else one
            for one in world.sessions
        ]
        sessions.append(Session(name, *ends))
        world = world._replace(sessions=remembered(sessions), num_sessions=number)
        world = self._ask_router(world, router, "open_session", name, world.workers[worker].name, ends[1])
        return self._ask_worker(world, worker, "open_session", name)[0]

    def _crash(self, world: RoutersWorld, index: int) -> RoutersWorld:
        worker = world.workers[index]
        sessions = [
            one.cut()._replace(knows_worker=False) if one.worker == worker.boot else one
            for one in world.sessions
        ]
        workers = with_item(world.workers, index, worker._replace(state=None))
        return world._replace(workers=workers, sessions=remembered(sessions))

    def _crash_router(self, world: RoutersWorld, index: int) -> RoutersWorld:
        router = world.routers[index]
        sessions = [
            one.cut()._replace(knows_router=False) if one.router == router.boot else one
            for one in world.sessions
        ]
        routers = with_item(world.routers, index, router._replace(state=None))
        return world._replace(routers=routers, sessions=remembered(sessions))

    def _cut(self, world: RoutersWorld, index: int) -> RoutersWorld:
        return world._replace(sessions=with_item(world.sessions, index, world.sessions[index].cut()))

    def _detect(self, world: RoutersWorld, index: int, is_router: bool) -> RoutersWorld:
        session = world.sessions[index]
        known = session._replace(knows_router=False) if is_router else session._replace(knows_worker=False)
        world = world._replace(sessions=remembered(with_item(world.sessions, index, known)))
        if is_router:
            return self._ask_router(world, find(world.routers, session.router), "lose_session", session.name)
        return self._ask_worker(world, find(world.workers, session.worker), "lose_session", session.name)[0]

    def _to_router(self, world: RoutersWorld, index: int) -> RoutersWorld:
        session = world.sessions[index]
        frame, *rest = session.to_router
        world = world._replace(
            sessions=with_item(world.sessions, index, session._replace(to_router=tuple(rest)))
        )
        return self._ask_router(world, find(world.routers, session.router), "receive", session.name, frame)

    def _to_worker(self, world: RoutersWorld, index: int) -> RoutersWorld:
        session = world.sessions[index]
        frame, *rest = session.to_worker
        world = world._replace(
            sessions=with_item(world.sessions, index, session._replace(to_worker=tuple(rest)))
        )
        return self._ask_worker(world, find(world.workers, session.worker), "receive", session.name, frame)[0]

    def _deliver(self, world: RoutersWorld, index: int) -> RoutersWorld:
        call = world.calls[index]
        world = world._replace(calls=world.calls[:index] + world.calls[index + 1 :])
        worker, router = find(world.workers, call.worker), find(world.routers, call.router)
        if worker is None:
            return world
        leg = call.number, call.attempt
        world, is_accepted = self._ask_worker(world, worker, "hand_off", *leg, call.next_attempt)
        return world if is_accepted else self._ask_router(world, router, "refuse", *leg)

    def _order(self, world: RoutersWorld, index: int, place: int) -> RoutersWorld:
        session = world.sessions[index]
        order = session.orders[place]
        left = session._replace(orders=session.orders[:place] + session.orders[place + 1 :])
        world = world._replace(sessions=with_item(world.sessions, index, left))
        worker = find(world.workers, session.worker)
        return self._ask_worker(world, worker, "take_order", session.name, order)[0]

    def _slow(self, world: RoutersWorld, index: int, place: int) -> RoutersWorld:
        """Let the router give up a start that is on its way."""
        session = world.sessions[index]
        order = session.orders[place]
        late = session._replace(orders=with_item(session.orders, place, order._replace(is_late=True)))
        world = world._replace(sessions=with_item(world.sessions, index, late))
        router = find(world.routers, session.router)
        leg = session.name, order.number, order.attempt
        return self._ask_router(world, router, "reject", *leg, "deadline")

    def _step(self, world: RoutersWorld, index: int) -> RoutersWorld:
        return self._ask_worker(world, index, "step")[0]

    def _divide(self, world: RoutersWorld, index: int) -> RoutersWorld:
        return self._ask_worker(world, index, "divide")[0]

    def _divide_all(self, world: RoutersWorld) -> RoutersWorld:
        for index in range(len(world.workers)):
            world = self._divide(world, index)
        return world

    def _leave(self, world: RoutersWorld, index: int, number: int) -> RoutersWorld:
        return self._ask_router(world, index, "give_up", number, "cancelled")

    def _overdue(self, world: RoutersWorld, index: int, number: int) -> RoutersWorld:
        return self._ask_router(world, index, "give_up", number, "deadline")

    def _ask_router(self, world: RoutersWorld, index: int | None, *call: Any) -> RoutersWorld:
        if index is None:
            return world
        router = world.routers[index]
        assert router.state is not None
        state, effects = self.routers.call(router.state, *call)
        world = world._replace(routers=with_item(world.routers, index, router._replace(state=state)))
        calls = [effect[1] for effect in effects if effect[0] == "call"]
        return _posted(world._replace(calls=tuple(sorted((*world.calls, *calls)))), effects)

    def _ask_worker(self, world: RoutersWorld, index: int | None, *call: Any) -> tuple[RoutersWorld, Any]:
        if index is None:
            return world, None
        worker = world.workers[index]
        assert worker.state is not None
        state, effects = self.machine_of(worker).call(worker.state, *call)
        links = world.links
        for effect in effects:
            if effect[0] in ("dial", "say"):
                links = posted(links, worker, effect[0] == "dial", effect[1], effect[2])
        workers = with_item(world.workers, index, worker._replace(state=state))
        world = world._replace(workers=workers, links=links)
        return _posted(world, effects), next((each[1] for each in effects if each[0] == "result"), None)


class RoutersExplorer(Explorer):
    """Explores worlds of several routers."""

    def make_rules(self, scenario: Scenario) -> RoutersRules:
        assert isinstance(scenario, RoutersScenario)
        return RoutersRules(scenario)


def find(parts: tuple[PartState, ...], boot: str) -> int | None:
    """Return the index of the living part of this incarnation."""
    found = (index for index, one in enumerate(parts) if one.boot == boot and one.state is not None)
    return next(found, None)


def _posted(world: RoutersWorld, effects: tuple[Any, ...]) -> RoutersWorld:
    """Return the world with the frames and orders of these effects on their way; those of a cut session are lost."""
    sessions = list(world.sessions)
    for kind, name, sent in (effect for effect in effects if effect[0] in _SENT):
        for index, one in enumerate(sessions):
            if one.name == name and not one.is_cut:
                sessions[index] = _with_sent(one, kind, sent)
    return world._replace(sessions=tuple(sessions))


def _with_sent(session: Session, kind: str, sent: Any) -> Session:
    match kind:
        case "to_router":
            return session._replace(to_router=(*session.to_router, sent))
        case "to_worker":
            return session._replace(to_worker=(*session.to_worker, sent))
        case _:
            return session._replace(orders=(*session.orders, sent))
