"""Routers in the worlds of ``flip_world``: what they choose and report, by production's decisions."""

from functools import cache
from typing import Any, cast

from msgspec.structs import replace

from contract.identity import Role
from contract.membership import Credit, Registration
from router.routing.legs import CONTINUATION, Placement
from router.routing.policy import Pairs, PlacementRequest, is_role_needed, never_bound, never_moved_to, place
from router.routing.running_shares import Held
from router.routing.views import WorkerView, WorkerViews
from router.workers.attached_worker import AttachedWorker
from router.workers.order_stream import OrderStream
from router.workers.worker_calls import WorkerCalls
from tests.protocol.flip_world import FULL, FlipRules, FlipWorld, Report, Request, Seen, source_of
from tests.protocol.world import with_item


def attached(name: str, seen: Seen) -> AttachedWorker:
    """Return production's record of a worker in a router, without the legs that are bound to it."""
    registration = Registration(worker_id=name, role=seen.role.value, max_model_len=64)
    worker = AttachedWorker(registration, cast(WorkerCalls, None), OrderStream(name, 10.0), Held(), ignore)
    worker.capacity.num_roles = seen.num_roles
    worker.capacity.credit = seen.credit
    return worker


@cache
def received(seen: Seen, message: Role | Credit) -> Seen:
    """Return a worker as a router has received it, after one more message."""
    capacity = attached("worker", seen).capacity
    if isinstance(message, Role):
        capacity.set_role(None)
        return Seen(message, capacity.credit, capacity.num_roles, seen.needs_role)
    capacity.grant(message)
    return seen._replace(credit=message)


def is_needed(seen: tuple[Seen, ...], index: int) -> bool:
    """Return whether a router answers that a worker must keep its role; see ``Registry.needs_role_of``."""
    next_role = seen[index].credit.next_role
    if not next_role:
        return False
    changes = [bool(one.credit.next_role) and not one.needs_role for one in seen]
    others = [
        (one.role, changes[other])
        for other, one in enumerate(seen)
        if other != index and attached("other", one).has_credit
    ]
    return is_role_needed(seen[index].role, Role(next_role), others, embeds_only=False)


@cache
def _views(seen: tuple[Seen, ...], only: tuple[int, ...]) -> WorkerViews:
    return WorkerViews.of(_view(str(index), seen[index]) for index in only)


@cache
def _view(name: str, seen: Seen) -> WorkerView:
    return attached(name, seen).view()


@cache
def placements(rules: FlipRules, seen: tuple[Seen, ...]) -> tuple[Placement, ...]:
    """Return all placements of a new request that production may choose, whatever the load is."""
    everybody = tuple(range(len(seen)))
    never: Pairs = never_bound(_views(seen, everybody)) if rules.never_binds else frozenset()
    wish = PlacementRequest(num_prompt_tokens=1, num_answer_tokens=1)
    pairs = [(a, b) for a in everybody for b in everybody if a < b]
    found = {place(_views(seen, pair), wish, 0, never) for pair in pairs}
    found |= {place(_views(seen, everybody), wish, turn, never) for turn in everybody}
    by_legs = {
        each.legs: each for each in found if each and (each.hand_over or _is_alone(seen, wish, never, each))
    }
    return tuple(by_legs[legs] for legs in sorted(by_legs, key=str))


def _is_alone(seen: tuple[Seen, ...], wish: PlacementRequest, never: Pairs, placement: Placement) -> bool:
    """Return whether production computes a prompt where it is decoded, with all these workers."""
    whole = place(_views(seen, tuple(range(len(seen)))), wish, 0, never)
    return whole is not None and whole.hand_over is None and placement.end == whole.end


@cache
def targets(
    rules: FlipRules, seen: tuple[Seen, ...], source: int, sources: frozenset[str]
) -> tuple[int, ...]:
    """Return the workers to which an answer may be moved. sources: workers that the router moves other answers from."""
    known = _views(seen, tuple(range(len(seen))))
    views = (
        known if rules.never_moves else WorkerViews.of(replace(each, is_unsettled=False) for each in known)
    )
    wish = PlacementRequest(
        num_prompt_tokens=1,
        num_answer_tokens=1,
        plan=CONTINUATION,
        too_small=never_moved_to(views, str(source), sources, frozenset()),
    )
    return tuple(index for index in range(len(seen)) if place(_views(seen, (index,)), wish, 0) is not None)


def ignore(*_: Any) -> None:
    """Do nothing."""


def num_left(world: FlipWorld, router: int, index: int) -> int:
    """Return how many legs and moves of a worker's former state a router reports."""
    return _num_left(world.requests, router, index, world.seen[router][index].num_roles)


@cache
def _num_left(requests: tuple[Request, ...], router: int, index: int, num_roles: int) -> int:
    own = [one for one in requests if one.router == router and one.phase != "done"]
    held = tuple(sorted(part.num_roles for one in own for part in one.parts if part.worker == index))
    num_moves = sum(source_of(one) == index for one in own)
    return _answer(held, num_roles, num_moves)


@cache
def _answer(held: tuple[int, ...], num_roles: int, num_moves: int) -> int:
    """held: of each leg that is bound, how many roles the worker had had then."""
    capacity = attached("worker", Seen(Role.DECODE, FULL)).capacity
    for count in range(1, num_roles + 1):
        for _ in range(held.count(count)):
            capacity.hold("client", 1)
        if count < num_roles:
            capacity.set_role(None)
    capacity.former.num_moves = num_moves
    return capacity.use().num_former


def reported(world: FlipWorld, router: int, index: int, *, is_answer: bool) -> FlipWorld:
    """Return the world in which a router has sent a worker what it has of its former state."""
    report = Report(num_left(world, router, index), is_answer, world.seen[router][index].needs_role)
    reports = (*world.up[index][router], report)
    return world._replace(up=with_item(world.up, index, with_item(world.up[index], router, reports)))
