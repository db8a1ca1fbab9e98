"""Small worlds of workers that change their roles and drain: what they send, and who waits for whose blocks.

The choice of workers is production's (``router.policy.place`` and ``never_bound``), and so is which calls and credits a role
has (``worker.lifecycle.Lifecycle``). A pool is a number of blocks, and each leg takes one. Messages between a worker and a
router keep their order; each of them arrives at any later moment. Nothing fails and no deadline passes, so a request that
does not end in a quiet world is in a deadlock.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from contract.identity import Role
from contract.membership import Credit
from router.legs import CONTINUATION, Placement
from router.policy import Pairs, PlacementRequest, never_bound, place
from router.views import WorkerView, WorkerViews
from tests.protocol.sink import LawBrokenError
from tests.protocol.world import with_item
from worker.lifecycle import LegCall, Lifecycle

Action = tuple[str, int, int]
"""Its name, a worker or request, and a router (0 where there is none) or the number of a choice."""


@dataclass(frozen=True)
class FlipRules:
    """Production's rules; a mutant has a switch for one of them.

    never_binds: no hand-over is bound between two unsettled workers (law 4 b). never_moves: no answer is moved to an
    unsettled worker (law 4 c). waits_for_answers: a worker changes only after every router has answered a credit of nothing.
    waits_for_former: it is settled only when no router has anything left of its former state. flips_settled: it takes a role
    only when it is settled.
    """

    never_binds: bool = True
    never_moves: bool = True
    waits_for_answers: bool = True
    waits_for_former: bool = True
    flips_settled: bool = True


@dataclass(frozen=True)
class FlipScenario:
    """One world. roles: of the workers in the beginning; blocks: of each pool. requests: the router of each one.

    decoded: the workers on which the first requests are decoded in the beginning. changes: (worker, role), (worker, "drain")
    and (worker, "undrain") that happen at any moment; those of one worker happen one after the other.
    """

    name: str
    roles: tuple[Role, ...]
    requests: tuple[int, ...]
    changes: tuple[tuple[int, str], ...]
    blocks: int = 1
    decoded: tuple[int, ...] = ()
    rules: FlipRules = FlipRules()

    @property
    def num_routers(self) -> int:
        """The number of routers."""
        return max(self.requests) + 1


class Seen(NamedTuple):
    """A worker as a router has received it. num_roles: that it has had."""

    role: Role
    has_credit: bool = True
    is_unsettled: bool = False
    is_draining: bool = False
    num_roles: int = 1


class Worker(NamedTuple):
    """A worker. closing: the role that it takes when every router has answered. unanswered, former: by router."""

    role: Role
    former_role: Role
    unanswered: tuple[int, ...]
    former: tuple[int, ...]
    closing: Role | None = None
    is_draining: bool = False
    is_unsettled: bool = False
    num_roles: int = 1


class Part(NamedTuple):
    """One leg. state: call (on its way), wait (for a block) or held. num_roles: of the worker, when it was bound."""

    worker: int
    num_roles: int
    state: str = "call"


class Request(NamedTuple):
    """One request. phase: new, bound, decoded or done. target: reserved for the move that was ordered.

    is_moved: it was moved, and ``send`` is the lease of that move.
    """

    router: int
    phase: str = "new"
    send: Part | None = None
    receive: Part | None = None
    target: Part | None = None
    is_moved: bool = False

    @property
    def parts(self) -> Iterator[Part]:
        """Every leg that is bound."""
        return (part for part in (self.send, self.receive, self.target) if part)


class FlipWorld(NamedTuple):
    """Everything that decides what can happen. down, up: messages by worker and router. changes: those that are left."""

    workers: tuple[Worker, ...]
    seen: tuple[tuple[Seen, ...], ...]
    down: tuple[tuple[tuple[Seen, ...], ...], ...]
    up: tuple[tuple[tuple[int, ...], ...], ...]
    requests: tuple[Request, ...]
    changes: tuple[tuple[int, str], ...]


def first_world(scenario: FlipScenario) -> FlipWorld:
    """Return the world in which every router has received the credit of every worker."""
    routers = range(scenario.num_routers)
    none = (0,) * scenario.num_routers
    return FlipWorld(
        tuple(Worker(role, role, none, none) for role in scenario.roles),
        tuple(tuple(Seen(role) for role in scenario.roles) for _ in routers),
        tuple(tuple(() for _ in routers) for _ in scenario.roles),
        tuple(tuple(() for _ in routers) for _ in scenario.roles),
        tuple(_first(scenario, number) for number in range(len(scenario.requests))),
        scenario.changes,
    )


def _first(scenario: FlipScenario, number: int) -> Request:
    router = scenario.requests[number]
    if number >= len(scenario.decoded):
        return Request(router)
    return Request(router, "decoded", receive=Part(scenario.decoded[number], 1, "held"))


def lifecycle_of(worker: Worker) -> Lifecycle:
    """Return production's record of a worker that does not drain."""
    lifecycle = Lifecycle(worker.former_role)
    lifecycle.take_role(worker.role, 1)
    lifecycle.is_closing = worker.closing is not None
    lifecycle.is_unsettled = worker.is_unsettled
    return lifecycle


@cache
def _views(seen: tuple[Seen, ...], only: tuple[int, ...]) -> WorkerViews:
    return WorkerViews.of(
        WorkerView(
            worker_id=str(index),
            role=seen[index].role,
            max_requests=99 * seen[index].has_credit,
            max_tokens=10_000,
            is_unsettled=seen[index].is_unsettled,
        )
        for index in only
    )


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
def targets(rules: FlipRules, seen: tuple[Seen, ...], source: int) -> tuple[int, ...]:
    """Return the workers to which an answer may be moved."""
    found = []
    for index in range(len(seen)):
        views = _views(seen, (index,))
        excluded = {str(source)} | (views.unsettled if rules.never_moves else set())
        wish = PlacementRequest(
            num_prompt_tokens=1, num_answer_tokens=1, plan=CONTINUATION, too_small=frozenset(excluded)
        )
        if place(views, wish, 0) is not None:
            found.append(index)
    return tuple(found)


def call_of(part_is_sending: bool) -> LegCall:
    """Return the call that starts a leg."""
    return LegCall.PREFILL if part_is_sending else LegCall.DECODE


def sent(world: FlipWorld, index: int, worker: Worker) -> FlipWorld:
    """Return the world in which a worker has changed, and sends every router its state and its credit."""
    offered = Credit() if worker.is_draining else lifecycle_of(worker).credit(Credit(max_requests=99))
    seen = Seen(
        worker.role, offered.max_requests > 0, worker.is_unsettled, worker.is_draining, worker.num_roles
    )
    down = with_item(world.down, index, tuple((*queue, seen) for queue in world.down[index]))
    worker = worker._replace(unanswered=tuple(count + 1 for count in worker.unanswered))
    return world._replace(workers=with_item(world.workers, index, worker), down=down)


def num_free(scenario: FlipScenario, world: FlipWorld, index: int) -> int:
    """Return the free blocks of a worker."""
    held = sum(
        part.worker == index and part.state == "held"
        for request in world.requests
        for part in (request.send, request.receive)
        if part
    )
    return scenario.blocks - held


def has_former(world: FlipWorld, router: int, index: int) -> int:
    """Return 1 if a router has a leg of a worker's former role, or moves an answer away from it."""
    num_roles = world.seen[router][index].num_roles
    for request in world.requests:
        if request.router != router or request.phase == "done":
            continue
        if any(part.worker == index and part.num_roles < num_roles for part in request.parts):
            return 1
        source = request.receive if request.target else request.send if request.is_moved else None
        if source and source.worker == index:
            return 1
    return 0


def has_mixed_kv(world: FlipWorld, index: int) -> bool:
    """Return whether a worker lends beside the fetches of its role, or fetches beside its leases; see ``worker.Worker``."""
    for request in world.requests:
        part = request.receive if world.workers[index].role is Role.PREFILL else request.send
        if part and part.worker == index and part.state != "call" and request.phase == "bound":
            return True
    return False


def refuse_unserved(worker: Worker, *, is_sending: bool) -> None:
    """Raise LawBrokenError if a worker does not serve the call that starts a leg."""
    if not lifecycle_of(worker).serves(call_of(is_sending)):
        raise LawBrokenError(f"a {worker.role.value} worker refuses a leg that was bound by its former role")
