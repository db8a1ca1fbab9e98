"""A search of all worlds of ``flip_world``, nearest first, with everything that can happen in them."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from contract.identity import Role
from tests.protocol.flip_world import (
    Action,
    FlipScenario,
    FlipWorld,
    Part,
    Request,
    first_world,
    has_former,
    has_mixed_kv,
    num_free,
    placements,
    refuse_unserved,
    sent,
    targets,
)
from tests.protocol.sink import LawBrokenError
from tests.protocol.world import with_item


@dataclass
class FlipFindings:
    """The results. broken: the first law that breaks; steps: the shortest way to it. num_moved: worlds after a move."""

    num_worlds: int = 0
    num_quiet: int = 0
    num_moved: int = 0
    is_complete: bool = False
    broken: str | None = None
    steps: list[str] = field(default_factory=list)


class FlipExplorer:
    """Explores every order of events of one scenario."""

    def __init__(self, scenario: FlipScenario, max_worlds: int | None = None) -> None:
        self.scenario = scenario
        self.max_worlds = max_worlds
        self.rules = scenario.rules

    def explore(self) -> FlipFindings:
        """Run to exhaustion, or to the first broken law."""
        found = FlipFindings()
        worlds = [first_world(self.scenario)]
        parents: dict[FlipWorld, tuple[FlipWorld, Action] | None] = {worlds[0]: None}
        for world in worlds:
            if self.max_worlds is not None and found.num_worlds >= self.max_worlds:
                return found
            found.num_worlds += 1
            action: Action | None = None
            try:
                actions = list(self.actions(world))
                for action in actions:
                    after = self.apply(world, action)
                    if after not in parents:
                        parents[after] = (world, action)
                        worlds.append(after)
                if not actions:
                    action = None
                    self._check_quiet(world, found)
            except LawBrokenError as error:
                found.broken = str(error)
                found.steps = self._way_to(world, parents, action)
                break
            found.num_moved += any(each.is_moved for each in world.requests)
        found.is_complete = found.broken is None
        return found

    def _check_quiet(self, world: FlipWorld, found: FlipFindings) -> None:
        found.num_quiet += 1
        if left := [
            str(number) for number, one in enumerate(world.requests) if one.phase in ("bound", "decoded")
        ]:
            raise LawBrokenError(f"deadlock: request {' and '.join(left)} can never end")
        if any(one.is_unsettled and not one.is_draining for one in world.workers):
            raise LawBrokenError("a worker is never settled again")

    def _way_to(
        self,
        world: FlipWorld,
        parents: "dict[FlipWorld, tuple[FlipWorld, Action] | None]",
        last: Action | None,
    ) -> list[str]:
        steps = [describe(world, last)] if last else []
        while (parent := parents[world]) is not None:
            world = parent[0]
            steps.append(describe(world, parent[1]))
        return steps[::-1]

    # What can happen.

    def actions(self, world: FlipWorld) -> Iterator[Action]:
        """Return everything that can happen next."""
        for index, worker in enumerate(world.workers):
            for router in range(self.scenario.num_routers):
                if world.down[index][router]:
                    yield "seen", index, router
                if world.up[index][router]:
                    yield "answered", index, router
            yield from self._changes_of(world, index)
            if not any(worker.unanswered):
                yield from self._answered_by_all(world, index)
        for number, request in enumerate(world.requests):
            yield from self._actions_of(world, number, request)

    def _answered_by_all(self, world: FlipWorld, index: int) -> Iterator[Action]:
        """Return what a worker does when every router has answered its last credit; see ``worker/settling.py``."""
        worker = world.workers[index]
        if worker.closing is not None:
            yield "take", index, 0
        elif worker.is_draining and not worker.is_unsettled:
            yield "unsettle", index, 0
        elif worker.is_unsettled and not worker.is_draining:
            former = [has_former(world, router, index) for router in range(self.scenario.num_routers)]
            is_left = any(worker.former) and self.rules.waits_for_former
            if not is_left and not has_mixed_kv(world, index):
                yield "settle", index, 0
            elif tuple(former) != worker.former:
                yield "ask", index, 0

    def _changes_of(self, world: FlipWorld, index: int) -> Iterator[Action]:
        """Return the next change of a worker, if it can be made now."""
        worker = world.workers[index]
        for place, (changed, what) in enumerate(world.changes):
            if changed != index:
                continue
            if what == "undrain":
                if worker.is_draining:
                    yield "change", index, place
            elif worker.closing is None and not worker.is_draining:
                may_flip = not worker.is_unsettled or not self.rules.flips_settled
                if what == "drain" or may_flip:
                    yield "change", index, place
            return

    def _actions_of(self, world: FlipWorld, number: int, request: Request) -> Iterator[Action]:
        seen = world.seen[request.router]
        if request.phase == "new":
            yield from (("bind", number, choice) for choice in range(len(placements(self.rules, seen))))
            return
        if request.phase == "decoded":
            yield "finish", number, 0
            assert request.receive is not None
            source = request.receive.worker
            if request.target is not None:
                yield "hand_off", number, 0
            elif not request.is_moved and self._leaves(world, request.router, source):
                choices = targets(self.rules, seen, source)
                yield from (
                    ("move", number, choice) for choice in choices if not _is_source(world, request, choice)
                )
            return
        if request.phase == "bound":
            yield from self._progress(world, number, request)

    def _progress(self, world: FlipWorld, number: int, request: Request) -> Iterator[Action]:
        (send, receive) = (request.send, request.receive)
        assert receive is not None
        if send and send.state == "call":
            yield "arrive_send", number, 0
        if send and send.state == "wait" and num_free(self.scenario, world, send.worker):
            yield "hold_send", number, 0
        if receive.state == "call":
            yield "arrive_receive", number, 0
        is_published = send is None or send.state == "held"
        if receive.state == "wait" and is_published and num_free(self.scenario, world, receive.worker):
            yield "hold_receive", number, 0
        if receive.state == "held" and is_published:
            yield "read", number, 0

    def _leaves(self, world: FlipWorld, router: int, index: int) -> bool:
        """Return whether a router moves answers away from a worker; see ``router.evacuation``."""
        seen = world.seen[router][index]
        return seen.is_unsettled and (seen.is_draining or seen.role is Role.PREFILL)

    # What happens then.

    def apply(self, world: FlipWorld, action: Action) -> FlipWorld:
        """Return the world after an action. Raises LawBrokenError."""
        kind, first, second = action
        after: FlipWorld = getattr(self, f"_{kind}")(world, first, second)
        return after

    def _change(self, world: FlipWorld, index: int, place: int) -> FlipWorld:
        what = world.changes[place][1]
        world = world._replace(changes=world.changes[:place] + world.changes[place + 1 :])
        worker = world.workers[index]
        if what == "undrain":
            return sent(world, index, worker._replace(is_draining=False))
        if what == "drain":
            is_unsettled = worker.is_unsettled or not self.rules.waits_for_answers
            return sent(world, index, worker._replace(is_draining=True, is_unsettled=is_unsettled))
        worker = worker._replace(closing=Role(what))
        if not self.rules.waits_for_answers:
            return self._take(world._replace(workers=with_item(world.workers, index, worker)), index, 0)
        return sent(world, index, worker)

    def _take(self, world: FlipWorld, index: int, _: int) -> FlipWorld:
        worker = world.workers[index]
        assert worker.closing is not None
        return sent(
            world,
            index,
            worker._replace(
                role=worker.closing,
                former_role=worker.role,
                closing=None,
                is_unsettled=True,
                num_roles=worker.num_roles + 1,
            ),
        )

    def _unsettle(self, world: FlipWorld, index: int, _: int) -> FlipWorld:
        return sent(world, index, world.workers[index]._replace(is_unsettled=True))

    def _settle(self, world: FlipWorld, index: int, _: int) -> FlipWorld:
        return sent(world, index, world.workers[index]._replace(is_unsettled=False))

    def _ask(self, world: FlipWorld, index: int, _: int) -> FlipWorld:
        return sent(world, index, world.workers[index])

    def _seen(self, world: FlipWorld, index: int, router: int) -> FlipWorld:
        (new, *rest) = world.down[index][router]
        seen = with_item(world.seen, router, with_item(world.seen[router], index, new))
        down = with_item(world.down, index, with_item(world.down[index], router, tuple(rest)))
        world = world._replace(seen=seen, down=down)
        answers = (*world.up[index][router], has_former(world, router, index))
        return world._replace(up=with_item(world.up, index, with_item(world.up[index], router, answers)))

    def _answered(self, world: FlipWorld, index: int, router: int) -> FlipWorld:
        (answer, *rest) = world.up[index][router]
        worker = world.workers[index]
        worker = worker._replace(
            former=with_item(worker.former, router, answer),
            unanswered=with_item(worker.unanswered, router, worker.unanswered[router] - 1),
        )
        up = with_item(world.up, index, with_item(world.up[index], router, tuple(rest)))
        return world._replace(up=up, workers=with_item(world.workers, index, worker))

    def _bind(self, world: FlipWorld, number: int, choice: int) -> FlipWorld:
        request = world.requests[number]
        seen = world.seen[request.router]
        placement = placements(self.rules, seen)[choice]
        *before, end = [Part(int(leg.worker), seen[int(leg.worker)].num_roles) for leg in placement.legs]
        return _with(
            world, number, request._replace(phase="bound", send=next(iter(before), None), receive=end)
        )

    def _arrive_send(self, world: FlipWorld, number: int, _: int) -> FlipWorld:
        request = world.requests[number]
        assert request.send is not None
        refuse_unserved(world.workers[request.send.worker], is_sending=True)
        return _with(world, number, request._replace(send=request.send._replace(state="wait")))

    def _arrive_receive(self, world: FlipWorld, number: int, _: int) -> FlipWorld:
        request = world.requests[number]
        assert request.receive is not None
        refuse_unserved(world.workers[request.receive.worker], is_sending=False)
        return _with(world, number, request._replace(receive=request.receive._replace(state="wait")))

    def _hold_send(self, world: FlipWorld, number: int, _: int) -> FlipWorld:
        request = world.requests[number]
        assert request.send is not None
        return _with(world, number, request._replace(send=request.send._replace(state="held")))

    def _hold_receive(self, world: FlipWorld, number: int, _: int) -> FlipWorld:
        request = world.requests[number]
        assert request.receive is not None
        return _with(world, number, request._replace(receive=request.receive._replace(state="held")))

    def _read(self, world: FlipWorld, number: int, _: int) -> FlipWorld:
        request = world.requests[number]
        return _with(world, number, request._replace(phase="decoded", send=None))

    def _finish(self, world: FlipWorld, number: int, _: int) -> FlipWorld:
        request = world.requests[number]
        return _with(world, number, Request(request.router, "done", is_moved=request.is_moved))

    def _move(self, world: FlipWorld, number: int, target: int) -> FlipWorld:
        request = world.requests[number]
        part = Part(target, world.seen[request.router][target].num_roles)
        return _with(world, number, request._replace(target=part))

    def _hand_off(self, world: FlipWorld, number: int, _: int) -> FlipWorld:
        request = world.requests[number]
        moved = request._replace(
            phase="bound", send=request.receive, receive=request.target, target=None, is_moved=True
        )
        return _with(world, number, moved)


def _with(world: FlipWorld, number: int, request: Request) -> FlipWorld:
    return world._replace(requests=with_item(world.requests, number, request))


def _is_source(world: FlipWorld, moved: Request, index: int) -> bool:
    """Return whether the same router moves an answer away from a worker; see ``router.moving.Mover``."""
    return any(
        one.router == moved.router and source is not None and source.worker == index
        for one in world.requests
        for source in [one.receive if one.target else one.send if one.is_moved else None]
    )


def describe(world: FlipWorld, action: Action) -> str:
    """Describe one step."""
    kind, first, second = action
    if kind in ("seen", "answered"):
        return f"worker {first}, router {second}: {kind}"
    if kind == "change":
        return f"worker {first}: {world.changes[second][1]}"
    if kind in ("take", "unsettle", "settle", "ask"):
        return f"worker {first}: {kind}"
    request = world.requests[first]
    where = [f"{part.worker}" for part in request.parts]
    return f"request {first} of router {request.router}: {kind} {second if kind == 'move' else ''} {'>'.join(where)}"
