"""The actions that are possible in a world of several routers whose workers hand KV over, and their results."""

from collections.abc import Iterator
from typing import Any

from tests.protocol.explorer import Explorer
from tests.protocol.happening import link_actions
from tests.protocol.link_rules import LinkRules
from tests.protocol.machine import Machine
from tests.protocol.routers.hand_over_sides import FetchingSide, HandOverRouter, HandOverScenario, LendingSide
from tests.protocol.routers.rules import RoutersRules, find
from tests.protocol.routers.worker_side import SessionsSide
from tests.protocol.routers.world import PartState, RoutersWorld
from tests.protocol.scenario import Scenario
from tests.protocol.world import Action, remembered, with_item, without
from worker.lifecycle import SettlingStep


class HandOverRules(RoutersRules, LinkRules[RoutersWorld]):
    """The actions that are possible in a world of this scenario, and their results."""

    scenario: HandOverScenario

    def __init__(self, scenario: HandOverScenario) -> None:
        super().__init__(scenario)
        self.prefills: Machine[Any] = Machine()
        self.decodes: Machine[Any] = Machine()

    @property
    def machines(self) -> list[Machine[Any]]:
        """The machines of all parts."""
        return [self.routers, self.prefills, self.decodes]

    def machine_of(self, worker: PartState) -> Machine[Any]:
        """Return the machine with this worker's states."""
        return self.prefills if worker.is_prefill else self.decodes

    def make_router(self, boot: str) -> HandOverRouter:
        """Return a router that has just started."""
        return HandOverRouter(self.scenario, self.sink, boot)

    def make_worker(self, worker: PartState) -> SessionsSide:
        """Return a worker that has just started."""
        make = LendingSide if worker.is_prefill else FetchingSide
        return make(self.scenario, self.sink, worker.boot)

    def find(self, world: RoutersWorld, boot: str) -> int | None:
        """Return the index of the living worker of this incarnation."""
        return find(world.workers, boot)

    def ask(self, world: RoutersWorld, index: int, *call: Any) -> tuple[RoutersWorld, Any]:
        """Call a worker."""
        return self._ask_worker(world, index, *call)

    def progress(self, world: RoutersWorld) -> Iterator[Action]:
        """Return the actions that happen sooner or later without a fault; those that happen at once come alone."""
        first = next(self._at_once(world), None)
        return super().progress(world) if first is None else iter((first,))

    def _at_once(self, world: RoutersWorld) -> Iterator[Action]:
        """Return what happens before anything else: also the return of a worker whose death all routers have detected."""
        yield from (("restart", index) for index, one in enumerate(world.workers) if _may_return(world, one))
        yield from self._attachable(world)
        for index, worker in enumerate(world.workers if self.scenario.reads_at_once else ()):
            if worker.state is not None:
                yield from self._own_actions(index, worker)
        if self.scenario.frames_at_once:
            yield from self._link_actions(world)

    def _link_actions(self, world: RoutersWorld) -> Iterator[Action]:
        """Return what may happen on links. A dial to a dead worker fails when its routers have lost it too, as they do."""
        for index, link in enumerate(world.links):
            is_known = any(one.worker == link.prefill and one.is_cut for one in world.sessions)
            if link.is_up or not is_known or self.find(world, link.prefill) is not None:
                yield from link_actions(index, link)

    def _own_actions(self, index: int, worker: PartState) -> Iterator[Action]:
        return ((action[0], index, *action[1:]) for action in self.look_at_worker(worker).actions)

    def time(self, world: RoutersWorld) -> Iterator[Action]:
        """Return the deadlines that pass when nothing else happens, soonest first."""
        living = [(index, one) for index, one in enumerate(world.workers) if one.state is not None]
        yield from (("expire", index) for index, one in living if one.is_prefill)
        yield from (("late", index) for index, one in living if not one.is_prefill)
        yield from super().time(world)

    def _lives(self, world: RoutersWorld) -> Iterator[Action]:
        yield from (action for action in super()._lives(world) if action[0] != "restart")
        yield from self._link_actions(world)
        for index, router in enumerate(world.routers):
            if router.state is not None:
                yield from (("move", index, number) for number in self.look_at_router(router).movable)
        for index, worker in enumerate(world.workers):
            if worker.state is not None:
                yield from self._own(world, index, worker)

    def _own(self, world: RoutersWorld, index: int, worker: PartState) -> Iterator[Action]:
        """Return what a worker does by itself, and the end of its drain, once answers may leave it."""
        seen = self.look_at_worker(worker)
        yield from self._own_actions(index, worker)
        if seen.settling is SettlingStep.STAY:
            yield "undrain", index
        if seen.settling in (SettlingStep.UNSETTLE, SettlingStep.SETTLE):
            yield "settle", index

    def _places(self, world: RoutersWorld, fault: str) -> Iterator[tuple[int, ...]]:
        """Return where a fault may strike: only what ``scenario.struck`` names."""
        parts = {"cut": world.sessions, "cut_link": world.links, "crash_router": world.routers}
        named: Any = parts.get(fault, world.workers)
        for place in self._all_places(world, fault):
            if fault == "leave" or named[place[0]][0].startswith(self.scenario.struck):
                yield place

    def _all_places(self, world: RoutersWorld, fault: str) -> Iterator[tuple[int, ...]]:
        if fault in ("drain", "cut_link"):
            parts: Any = world.workers if fault == "drain" else world.links
            yield from ((index,) for index, one in enumerate(parts) if self._may_strike(fault, one))
        else:
            yield from super()._places(world, fault)

    def _may_strike(self, fault: str, part: Any) -> bool:
        if fault == "cut_link":
            return part.is_up and not part.is_cut
        return part.state is not None and not self.look_at_worker(part).is_draining

    def _attach(self, world: RoutersWorld, router: int, worker: int) -> RoutersWorld:
        """Open a session, and let its first credit arrive, and the answer to it."""
        world = super()._attach(world, router, worker)
        name = world.num_sessions
        for queue in ("to_router", "to_worker"):
            index = next(i for i, one in enumerate(world.sessions) if one.name.endswith(f"/{name}"))
            for _ in getattr(world.sessions[index], queue):
                world = getattr(self, f"_{queue}")(world, index)
        return world

    def _move(self, world: RoutersWorld, index: int, number: int) -> RoutersWorld:
        return self._ask_router(world, index, "move", number)

    def _drain(self, world: RoutersWorld, index: int) -> RoutersWorld:
        return self.call(world, index, "begin_drain")

    def _undrain(self, world: RoutersWorld, index: int) -> RoutersWorld:
        return self.call(world, index, "end_drain")

    def _settle(self, world: RoutersWorld, index: int) -> RoutersWorld:
        return self.call(world, index, "settle_on")

    def _cut_link(self, world: RoutersWorld, index: int) -> RoutersWorld:
        return world._replace(links=with_item(world.links, index, world.links[index].cut()))

    def _crash(self, world: RoutersWorld, index: int) -> RoutersWorld:
        worker = world.workers[index]
        world = self._end_readers(world, worker)
        links = tuple(without(link, worker.boot) for link in world.links)
        return super()._crash(world._replace(links=remembered(links)), index)


def _may_return(world: RoutersWorld, worker: PartState) -> bool:
    return worker.state is None and not any(one.worker == worker.boot for one in world.sessions)


class HandOverExplorer(Explorer):
    """Explores worlds of several routers whose workers hand KV over."""

    def make_rules(self, scenario: Scenario) -> HandOverRules:
        assert isinstance(scenario, HandOverScenario)
        return HandOverRules(scenario)
