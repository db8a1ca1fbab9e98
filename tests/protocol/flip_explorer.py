"""A search of all worlds of ``flip_world``, nearest first, with everything that can happen in them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from contract.identity import Role
from contract.membership import Credit
from router.routing.policy import decodes_no_more, missing_roles
from tests.protocol.flip_router import (
    is_needed,
    num_left,
    placements,
    received,
    reported,
    targets,
)
from tests.protocol.flip_world import (
    Action,
    FlipScenario,
    FlipWorld,
    Part,
    Request,
    Worker,
    first_world,
    flip_step,
    lifecycle_of,
    num_free,
    order_of,
    refuse_unserved,
    sent,
    settling_step,
    source_of,
    with_lifecycle,
)
from tests.protocol.sink import LawBrokenError
from tests.protocol.world import with_item
from worker.lifecycle import FlipStep, Lifecycle, SettlingStep

_WAITS = (FlipStep.WAIT_SETTLED, FlipStep.WAIT_ANSWERED)


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
        for seen in world.seen:
            for worker, one in zip(world.workers, seen, strict=True):
                if not worker.is_draining and not one.credit.max_requests:
                    raise LawBrokenError("a worker never offers its credit again")

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
            yield from self._steps_of(world, index, worker)
        for number, request in enumerate(world.requests):
            yield from self._actions_of(world, number, request)

    def _steps_of(self, world: FlipWorld, index: int, worker: Worker) -> Iterator[Action]:
        """Return what a worker does next by production's decisions."""
        if worker.order and (step := flip_step(self.rules, worker)) not in _WAITS:
            yield step.value, index, 0
        settling = settling_step(self.rules, world, index)
        if settling in (SettlingStep.UNSETTLE, SettlingStep.SETTLE):
            yield settling.value, index, 0

    def _changes_of(self, world: FlipWorld, index: int) -> Iterator[Action]:
        """Return the next change of a worker, if it can be made now. A drain and its end may come during a change."""
        worker = world.workers[index]
        for place, (changed, what) in enumerate(world.changes):
            if changed != index:
                continue
            is_possible = worker.is_draining is (what == "undrain")
            if is_possible and (worker.order is None or "drain" in what):
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
            elif not request.is_moved and decodes_no_more(seen[source].role, seen[source].credit):
                sources = frozenset(str(one) for one in _sources_of(world, request.router))
                choices = targets(self.rules, seen, source, sources)
                yield from (("move", number, choice) for choice in choices)
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

    # What happens then.

    def apply(self, world: FlipWorld, action: Action) -> FlipWorld:
        """Return the world after an action. Raises LawBrokenError."""
        kind, first, second = action
        after: FlipWorld = getattr(self, f"_{kind}")(world, first, second)
        return self._with_reports(world, after)

    def _with_reports(self, before: FlipWorld, after: FlipWorld) -> FlipWorld:
        """Add what the routers report on their own: nothing is left; see ``WorkerCapacity``."""
        if before.requests == after.requests or not self.rules.reports_end:
            return after
        for index in range(len(after.workers)):
            for router in range(self.scenario.num_routers):
                if num_left(before, router, index) and not num_left(after, router, index):
                    after = reported(after, router, index, is_answer=False)
        return after

    def _change(self, world: FlipWorld, index: int, place: int) -> FlipWorld:
        what = world.changes[place][1]
        world = world._replace(changes=world.changes[:place] + world.changes[place + 1 :])
        worker = world.workers[index]
        if what in ("drain", "undrain"):
            change = Lifecycle.drain if what == "drain" else Lifecycle.undrain
            worker = _changed(worker, change)
            if worker.is_draining and not self.rules.waits_for_answers:
                worker = worker._replace(is_unsettled=True)
            return sent(world, index, worker)
        worker = worker._replace(order=Role(what))
        if not self.rules.waits_for_answers:
            return self._take(world._replace(workers=with_item(world.workers, index, worker)), index, 0)
        if flip_step(self.rules, worker) is FlipStep.CLOSE:
            return sent(world, index, worker._replace(next_role=worker.order))
        return world._replace(workers=with_item(world.workers, index, worker))

    def _close(self, world: FlipWorld, index: int, _: int) -> FlipWorld:
        worker = world.workers[index]
        return sent(world, index, worker._replace(next_role=worker.order))

    def _take(self, world: FlipWorld, index: int, _: int) -> FlipWorld:
        order = order_of(world.workers[index])
        worker = _changed(world.workers[index], lambda one: one.set_role(Role(order.role), order.epoch))
        world = sent(world, index, worker._replace(order=None, num_drains=0), has_role=True)
        roles = [one.role for one in world.workers]
        if self.scenario.keeps_roles and missing_roles(roles, embeds_only=False):
            raise LawBrokenError("no worker is left for a role")
        return world

    def _keep(self, world: FlipWorld, index: int, _: int) -> FlipWorld:
        """Keep the role; see ``worker.flipping.Flip._take``. The epoch, which counts roles here, is left as it is."""
        kept = world.workers[index]._replace(order=None, num_drains=0, next_role=None)
        return sent(world, index, kept)

    def _end(self, world: FlipWorld, index: int, _: int) -> FlipWorld:
        """End a change; see ``worker.flipping.Flip._end``."""
        worker = world.workers[index]
        ended = worker._replace(order=None, num_drains=0, next_role=None)
        if worker.next_role and self.rules.offers_again:
            return sent(world, index, ended)
        return world._replace(workers=with_item(world.workers, index, ended))

    def _unsettle(self, world: FlipWorld, index: int, _: int) -> FlipWorld:
        return sent(world, index, world.workers[index]._replace(is_unsettled=True))

    def _settle(self, world: FlipWorld, index: int, _: int) -> FlipWorld:
        return sent(world, index, world.workers[index]._replace(is_unsettled=False))

    def _seen(self, world: FlipWorld, index: int, router: int) -> FlipWorld:
        (message, *rest) = world.down[index][router]
        seen = received(world.seen[router][index], message)
        down = with_item(world.down, index, with_item(world.down[index], router, tuple(rest)))
        known = with_item(world.seen[router], index, seen)
        if self.scenario.keeps_roles and self.rules.keeps_roles and isinstance(message, Credit):
            seen = seen._replace(needs_role=is_needed(known, index))
            known = with_item(known, index, seen)
        world = world._replace(seen=with_item(world.seen, router, known), down=down)
        if isinstance(message, Role):
            return world
        return reported(world, router, index, is_answer=True)

    def _answered(self, world: FlipWorld, index: int, router: int) -> FlipWorld:
        (report, *rest) = world.up[index][router]
        worker = world.workers[index]
        worker = worker._replace(
            former=with_item(worker.former, router, report.num_former),
            needing=with_item(worker.needing, router, report.needs_role),
            unanswered=with_item(worker.unanswered, router, worker.unanswered[router] - report.is_answer),
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


def _changed(worker: Worker, change: Callable[[Lifecycle], None]) -> Worker:
    lifecycle = lifecycle_of(worker)
    change(lifecycle)
    return with_lifecycle(worker, lifecycle)


def _sources_of(world: FlipWorld, router: int) -> set[int]:
    """Return the workers that a router moves answers away from; see ``router.migration.migrator.Migrator``."""
    sources = (source_of(one) for one in world.requests if one.router == router)
    return {source for source in sources if source is not None}


def describe(world: FlipWorld, action: Action) -> str:
    """Describe one step."""
    kind, first, second = action
    if kind in ("seen", "answered"):
        return f"worker {first}, router {second}: {kind}"
    if kind == "change":
        return f"worker {first}: {world.changes[second][1]}"
    if kind in (*FlipStep, *SettlingStep):
        return f"worker {first}: {kind}"
    request = world.requests[first]
    where = [f"{part.worker}" for part in request.parts]
    return f"request {first} of router {request.router}: {kind} {second if kind == 'move' else ''} {'>'.join(where)}"
