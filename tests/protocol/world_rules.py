"""The actions that are possible in a world, and their results."""

from collections.abc import Callable, Iterator
from typing import Any

from contract.requests import ReceiveTransfer, SendTransfer
from tests.protocol.decode_side import DecodeSide, sender_of
from tests.protocol.happening import PLACES, link_actions, look
from tests.protocol.machine import Machine
from tests.protocol.prefill_side import PrefillSide
from tests.protocol.reads import advance_read, break_read, look_at_reads
from tests.protocol.router_request import is_started_by
from tests.protocol.router_side import RouterSide
from tests.protocol.scenario import Scenario
from tests.protocol.sink import Sink
from tests.protocol.world import Action, WorkerState, World, posted, remembered, with_item, without


class WorldRules:
    """The actions that are possible in a world of this scenario, and their results. Owns the machines."""

    def __init__(self, scenario: Scenario, make: type[Machine[Any]] = Machine) -> None:
        self.scenario = scenario
        self.sink = Sink()
        self.prefills: Machine[PrefillSide] = make()
        self.decodes: Machine[DecodeSide] = make()
        self.routers: Machine[RouterSide] = make()

    def begin(self) -> World:
        """Return the first world: every request has arrived, and its legs are on their way."""
        router = self.routers.number(RouterSide(self.scenario, self.sink))
        workers = [WorkerState(f"P{index}", True) for index in range(self.scenario.num_prefill)]
        workers += [WorkerState(f"D{index}", False) for index in range(self.scenario.num_decode)]
        workers = [self._boot(worker) for worker in workers]
        return World(self.scenario.num_faults, router, tuple(workers), streams=((),) * len(workers))

    @property
    def machines(self) -> list[Machine[Any]]:
        """The machines of all parts."""
        return [self.prefills, self.decodes, self.routers]

    def endings(self, world: World) -> Iterator[tuple[str | None, tuple[str, ...]]]:
        """Return how the requests have ended, with the attempts that they took."""
        requests = self.routers.states[world.router].requests
        return ((request.ended, tuple(request.rungs)) for request in requests)

    def machine_of(self, worker: WorkerState) -> Machine[Any]:
        """Return the machine with this worker's states."""
        return self.prefills if worker.is_prefill else self.decodes

    def progress(self, world: World) -> Iterator[Action]:
        """Return the actions that happen sooner or later without a fault.

        If something is on its way that will be dropped, its arrival is the only action: it commutes with all others, so the
        worlds between are left out.
        """
        idle = self._idle_arrival(world)
        return self._all_progress(world) if idle is None else iter((idle,))

    def _idle_arrival(self, world: World) -> Action | None:
        router = self.routers.states[world.router]
        for index, call in enumerate(router.calls):
            if self.find(world, call[1]) is None:
                return "deliver", index
        for index, stream in enumerate(world.streams if self.scenario.rules.tells_attempts_apart else ()):
            worker = world.workers[index]
            is_heard = bool(stream) and router.workers.get(worker.name) == worker.boot
            if is_heard and not router.cares(worker.boot, stream[0]):
                return "hear", index
        return None

    def _all_progress(self, world: World) -> Iterator[Action]:
        router = self.routers.states[world.router]
        for index, call in enumerate(router.calls):
            if call[0] != "cancel" or not any(is_started_by(call, other) for other in router.calls):
                yield "deliver", index
        if self.scenario.num_moves:
            yield from (("move", number) for number in self.routers.view(world.router, RouterSide.movable))
        yield from self._choices(router)
        for index, worker in enumerate(world.workers):
            yield from self._life(world, router, index, worker)
            if worker.state is not None:
                for action in self.machine_of(worker).view(worker.state, look):
                    yield (action[0], index, *action[1:])
        for index, link in enumerate(world.links):
            yield from link_actions(index, link)
        for index in range(len(world.limbo)):
            yield "limbo", index

    def _choices(self, router: RouterSide) -> Iterator[Action]:
        """Return what the clients may do at any moment, without a fault."""
        for request in router.requests if self.scenario.may_leave else ():
            if not request.ended:
                yield "leave", request.number

    def _life(self, world: World, router: RouterSide, index: int, worker: WorkerState) -> Iterator[Action]:
        """Return the actions by which the router gets a worker's stream, and a dead worker comes back."""
        is_known = router.workers.get(worker.name) == worker.boot
        if world.streams[index] and is_known:
            yield "hear", index
        if is_known and worker.state is not None and worker.name in router.draining:
            yield from self._drain_on(world, router, index, worker)
        if is_known and (worker.state is None or not worker.is_attached):
            yield "lose", index
        elif worker.state is None and not is_known:
            yield "restart", index
        elif not worker.is_attached and not is_known:
            yield "wake", index

    def _drain_on(
        self, world: World, router: RouterSide, index: int, worker: WorkerState
    ) -> Iterator[Action]:
        """Return the actions of a drain: its deadline, and the end of a worker that holds nothing any more."""
        has_legs = router.has_legs(worker.name)
        if has_legs and not router.draining[worker.name]:
            yield "evict", index
        if has_legs and self.scenario.rules.leaves_unbound:
            return
        if not (world.streams[index] or self.machine_of(worker).states[worker.state or 0].what_is_held()):
            yield "exit", index

    def faults(self, world: World) -> Iterator[Action]:
        """Return the actions of the environment; each costs one fault."""
        if world.num_faults == 0:
            return
        for name in self.scenario.faults:
            yield from ((name, *place) for place in PLACES[name](self, world))

    def time(self, world: World) -> Iterator[Action]:
        """Return the deadlines that pass when nothing else happens, soonest first."""
        for index, worker in enumerate(world.workers):
            if worker.state is not None and worker.is_prefill:
                yield "expire", index
        for index, worker in enumerate(world.workers):
            if worker.state is not None and not worker.is_prefill:
                yield "late", index
        for request in self.routers.states[world.router].requests:
            if not request.ended:
                yield "overdue", request.number

    def what_is_left(self, world: World) -> list[str]:
        """Return what must not exist in a world where nothing more happens."""
        router = self.routers.states[world.router]
        left = [f"request {one.number} has not ended" for one in router.requests if not one.ended]
        for worker in world.workers:
            if worker.state is not None:
                held = self.machine_of(worker).states[worker.state].what_is_held()
                left += [f"{worker.boot}: {what}" for what in held]
        return left

    def apply(self, world: World, action: Action, *, is_fault: bool = False) -> World:
        """Return the world after an action. Raises LawBrokenError."""
        after: World = getattr(self, f"_{action[0]}")(world, *action[1:])
        return after._replace(num_faults=after.num_faults - 1) if is_fault else after

    # Calls, streams and the workers' lives.

    def _deliver(self, world: World, index: int) -> World:
        kind, boot, number, attempt, num_delivered, sender = self.routers.states[world.router].calls[index]
        world = self.ask_router(world, "deliver", index)
        place = self.find(world, boot)
        if place is None or not world.workers[place].is_attached:
            return world
        if kind == "hand_off":
            (world, is_accepted) = self.ask(world, place, "hand_off", number, attempt, num_delivered)
            return world if is_accepted else self.ask_router(world, "refuse", number, attempt)
        if kind == "cancel":
            return self.call(world, place, "cancel", str(number), attempt)
        transfer: SendTransfer | ReceiveTransfer | None = None
        if sender:
            receive = ReceiveTransfer(f"t{number}", sender.split(".")[0], sender, "127.0.0.1:1")
            transfer = SendTransfer(f"t{number}") if kind == "prefill" else receive
        return self.call(world, place, "accept", number, attempt, num_delivered, transfer)

    def _hear(self, world: World, index: int) -> World:
        worker, stream = world.workers[index], world.streams[index]
        world = world._replace(streams=with_item(world.streams, index, stream[1:]))
        return self.ask_router(world, "hear", worker.name, worker.boot, stream[0])

    def _lose(self, world: World, index: int) -> World:
        world = world._replace(streams=with_item(world.streams, index, ()))
        return self.ask_router(world, "lose", world.workers[index].name)

    def _drain(self, world: World, index: int) -> World:
        return self.ask_router(world, "drain", world.workers[index].name)

    def _evict(self, world: World, index: int) -> World:
        return self.ask_router(world, "move_legs", world.workers[index].name)

    def _exit(self, world: World, index: int) -> World:
        return self._crash(world, index)

    def _restart(self, world: World, index: int) -> World:
        worker = self._boot(world.workers[index])
        world = world._replace(workers=with_item(world.workers, index, worker))
        return self.ask_router(world, "attach", worker.name, worker.boot)

    def _boot(self, worker: WorkerState) -> WorkerState:
        boot = f"{worker.name}.{worker.num_boots + 1}"
        make: Callable[..., Any] = PrefillSide if worker.is_prefill else DecodeSide
        state = self.machine_of(worker).number(make(self.scenario, self.sink, boot))
        return WorkerState(worker.name, worker.is_prefill, worker.num_boots + 1, boot, state)

    def _wake(self, world: World, index: int) -> World:
        world = self.call(world, index, "abort_all")
        worker = world.workers[index]
        world = world._replace(workers=with_item(world.workers, index, worker._replace(is_attached=True)))
        return self.ask_router(world, "attach", worker.name, worker.boot)

    def _crash(self, world: World, index: int) -> World:
        worker = world.workers[index]
        world = self._end_readers(world, worker)
        links = tuple(without(link, worker.boot) for link in world.links)
        workers = with_item(world.workers, index, worker._replace(state=None))
        return world._replace(workers=workers, links=remembered(links))

    def _end_readers(self, world: World, reader: WorkerState) -> World:
        if self.scenario.is_one_sided or reader.is_prefill or reader.state is None:
            return world
        for lane, reading in look_at_reads(self.decodes.states[reader.state]):
            place = self.find(world, sender_of(lane))
            if place is not None and reading.stage in ("copying", "copied"):
                world = self.call(world, place, "end_read", reading.name)
        return world

    def _deaf(self, world: World, index: int) -> World:
        worker = world.workers[index]._replace(is_attached=False)
        return world._replace(workers=with_item(world.workers, index, worker))

    # What a worker does.

    def _step(self, world: World, index: int) -> World:
        return self.call(world, index, "step")

    def _digest(self, world: World, index: int) -> World:
        return self.call(world, index, "digest", False)

    def _spoil(self, world: World, index: int) -> World:
        return self.call(world, index, "digest", True)

    def _commit(self, world: World, index: int) -> World:
        return self.call(world, index, "commit")

    def _read(self, world: World, index: int, peer: str) -> World:
        return advance_read(self, world, index, peer, is_corrupt=False)

    def _corrupt(self, world: World, index: int, peer: str) -> World:
        return advance_read(self, world, index, peer, is_corrupt=True)

    def _break(self, world: World, index: int, lane: str) -> World:
        return break_read(self, world, index, lane)

    def _sever(self, world: World, index: int, lane: str) -> World:
        return self.call(world, index, "sever", lane)

    def _expire(self, world: World, index: int) -> World:
        boot = world.workers[index].boot
        living = {
            link.decode for link in world.links if link.prefill == boot and link.is_up and not link.is_cut
        }
        return self.call(world, index, "expire", tuple(sorted(living)))

    def _starve(self, world: World, index: int) -> World:
        return self.call(world, index, "expire", ())

    _starve_read = _starve

    def _late(self, world: World, index: int) -> World:
        return self.call(world, index, "run_out_of_time")

    # What the router and its clients do.

    def _doubt(self, world: World, number: int) -> World:
        return self.ask_router(world, "doubt", number)

    def _silence(self, world: World, number: int) -> World:
        return self.ask_router(world, "give_up_target", number)

    def _move(self, world: World, number: int) -> World:
        return self.ask_router(world, "move", number)

    def _leave(self, world: World, number: int) -> World:
        return self.ask_router(world, "give_up", number, "cancelled")

    def _overdue(self, world: World, number: int) -> World:
        return self.ask_router(world, "give_up", number, "deadline")

    # The links.

    def _connect(self, world: World, index: int) -> World:
        link = world.links[index]
        prefill, decode = self.find(world, link.prefill), self.find(world, link.decode)
        assert decode is not None
        if prefill is None:
            world = world._replace(
                links=remembered(with_item(world.links, index, link._replace(knows_decode=False)))
            )
            return self.call(world, decode, "link_down", link.prefill)
        up = link._replace(is_up=True, knows_prefill=True)
        world = world._replace(links=with_item(world.links, index, up))
        for other in [i for i, one in enumerate(world.links) if i != index and one.knows_prefill]:
            if world.links[other][:2] == link[:2]:
                older = world.links[other]._replace(knows_prefill=False)
                world = world._replace(links=with_item(world.links, other, older))
                world = self.call(world, prefill, "peer_gone", link.decode)
        world = self.call(world, decode, "link_up", link.prefill)
        return world._replace(links=remembered(world.links))

    def _to_prefill(self, world: World, index: int) -> World:
        link = world.links[index]
        world = world._replace(
            links=with_item(world.links, index, link._replace(to_prefill=link.to_prefill[1:]))
        )
        return self._say(world, link.prefill, link.decode, link.to_prefill[0])

    def _to_decode(self, world: World, index: int) -> World:
        link = world.links[index]
        world = world._replace(
            links=with_item(world.links, index, link._replace(to_decode=link.to_decode[1:]))
        )
        return self._say(world, link.decode, link.prefill, link.to_decode[0])

    def _say(self, world: World, receiver: str, sender: str, frame: bytes) -> World:
        place = self.find(world, receiver)
        return world if place is None else self.call(world, place, "hear", sender, frame)

    def _notice(self, world: World, index: int, is_prefill: bool) -> World:
        link = world.links[index]
        side, peer = (link.prefill, link.decode) if is_prefill else (link.decode, link.prefill)
        known = link._replace(knows_prefill=False) if is_prefill else link._replace(knows_decode=False)
        world = world._replace(links=remembered(with_item(world.links, index, known)))
        place = self.find(world, side)
        assert place is not None
        return self.call(world, place, "peer_gone" if is_prefill else "link_down", peer)

    def _cut(self, world: World, index: int) -> World:
        return world._replace(links=with_item(world.links, index, world.links[index].cut()))

    def _repeat(self, world: World, index: int, is_to_prefill: bool) -> World:
        link = world.links[index]
        ends = (link.prefill, link.decode) if is_to_prefill else (link.decode, link.prefill)
        frame = (link.to_prefill if is_to_prefill else link.to_decode)[0]
        return world._replace(limbo=tuple(sorted((*world.limbo, (*ends, frame)))))

    def _delay(self, world: World, index: int, is_to_prefill: bool) -> World:
        world, link = self._repeat(world, index, is_to_prefill), world.links[index]
        rest = (
            link._replace(to_prefill=link.to_prefill[1:])
            if is_to_prefill
            else link._replace(to_decode=link.to_decode[1:])
        )
        return world._replace(links=with_item(world.links, index, rest))

    def _limbo(self, world: World, index: int) -> World:
        receiver, sender, frame = world.limbo[index]
        world = world._replace(limbo=world.limbo[:index] + world.limbo[index + 1 :])
        is_linked = any(
            link.is_up and not link.is_cut and {link.prefill, link.decode} == {receiver, sender}
            for link in world.links
        )
        return self._say(world, receiver, sender, frame) if is_linked else world

    # The pieces of all this.

    def find(self, world: World, boot: str) -> int | None:
        """Return the index of the living worker of this incarnation."""
        for index, worker in enumerate(world.workers):
            if worker.boot == boot and worker.state is not None:
                return index
        return None

    def ask_router(self, world: World, *call: Any) -> World:
        """Call the router."""
        state, _ = self.routers.call(world.router, *call)
        num_faults, _, workers, links, streams, limbo = world
        return World(num_faults, state, workers, links, streams, limbo)

    def ask(self, world: World, index: int, *call: Any) -> tuple[World, Any]:
        """Call a worker; return the world with the messages to others on their way, and the call's result."""
        worker = world.workers[index]
        assert worker.state is not None
        state, effects = self.machine_of(worker).call(worker.state, *call)
        num_faults, router, workers, links, streams, limbo = world
        name, is_prefill, num_boots, boot, _, is_attached = worker
        changed = WorkerState(name, is_prefill, num_boots, boot, state, is_attached)
        workers = (*workers[:index], changed, *workers[index + 1 :])
        result = None
        for effect in effects:
            if effect[0] == "result":
                result = effect[1]
            elif effect[0] != "entry":
                links = posted(links, worker, effect[0] == "dial", effect[1], effect[2])
            elif is_attached:
                streams = with_item(streams, index, (*streams[index], effect[1:]))
        return World(num_faults, router, workers, links, streams, limbo), result

    def call(self, world: World, index: int, *call: Any) -> World:
        """Call a worker whose result does not matter."""
        return self.ask(world, index, *call)[0]
