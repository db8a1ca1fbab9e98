"""Small worlds of workers that change their roles and drain: what they send, and who waits for whose blocks.

Production decides: which workers are chosen, and between which nothing is handed over or moved (``router.routing.policy``);
which calls and credits a role has (``worker.lifecycle``); what a worker does next (``worker.lifecycle``); what a router
makes of a role and a credit, and what it reports (``router.workers.attached_worker``, ``router.workers.capacity``). A pool
is a number of blocks, and each leg takes one. Messages between a worker and a router keep their order; each of them arrives
at any later moment.
Nothing fails and no deadline passes, so a request that does not end in a quiet world is in a deadlock.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from msgspec.structs import replace

from contract.identity import Role
from contract.membership import Credit, RoleOrder
from roles.table import ROLES
from tests.protocol.sink import LawBrokenError
from tests.protocol.world import with_item
from worker.lifecycle import (
    FlipStep,
    Lifecycle,
    SettlingStep,
    next_flip_step,
    next_settling_step,
)
from worker.role_rules import LegCall

Action = tuple[str, int, int]
"""Its name, a worker or request, and a router (0 where there is none) or the number of a choice."""


FULL = Credit(max_requests=99, max_tokens=10_000, number=1)
"""The credit of a worker that serves. The numbers of credits are left out: each one is answered in its turn."""


@dataclass(frozen=True)
class FlipRules:
    """Production's rules; a mutant has a switch for one of them.

    never_binds: no hand-over is bound between two unsettled workers (law 4 b). never_moves: no answer is moved to an
    unsettled worker (law 4 c). waits_for_answers: a worker changes only after every router has answered a credit of nothing.
    waits_for_former: it is settled only when no router has anything left of its former state. flips_settled: it takes a role
    only when it is settled. offers_again: a worker whose change was ended by a drain offers its credit again. reports_end: a
    router reports on its own that nothing is left of a worker's former state. keeps_roles: see the scenario.
    """

    never_binds: bool = True
    never_moves: bool = True
    waits_for_answers: bool = True
    waits_for_former: bool = True
    flips_settled: bool = True
    offers_again: bool = True
    reports_end: bool = True
    keeps_roles: bool = True


@dataclass(frozen=True)
class FlipScenario:
    """One world. roles: of the workers in the beginning; blocks: of each pool. requests: the router of each one.

    decoded: the workers on which the first requests are decoded in the beginning. changes: (worker, role), (worker, "drain")
    and (worker, "undrain") that happen at any moment; those of one worker happen one after the other. keeps_roles: routers
    refuse changes that together leave no worker of a role. Without it the other laws are checked for any changes.
    """

    name: str
    roles: tuple[Role, ...]
    requests: tuple[int, ...]
    changes: tuple[tuple[int, str], ...]
    blocks: int = 1
    decoded: tuple[int, ...] = ()
    keeps_roles: bool = False
    rules: FlipRules = FlipRules()

    @property
    def num_routers(self) -> int:
        """The number of routers."""
        return max(self.requests) + 1


class Seen(NamedTuple):
    """A worker as a router has received it. num_roles: that it has had. needs_role: the router's answer to its credit."""

    role: Role
    credit: Credit
    num_roles: int = 1
    needs_role: bool = False


class Worker(NamedTuple):
    """A worker. order: the role that it is to take. num_drains: begun since then. unanswered, former, needing: by router."""

    role: Role
    former_role: Role
    unanswered: tuple[int, ...]
    former: tuple[int, ...]
    needing: tuple[bool, ...]
    order: Role | None = None
    num_drains: int = 0
    next_role: Role | None = None
    is_draining: bool = False
    is_unsettled: bool = False
    num_roles: int = 1


class Answers(NamedTuple):
    """The routers' answers as production's decisions read them."""

    are_answered: bool
    num_former: int
    need_role: bool


class Report(NamedTuple):
    """A router's report of legs and moves of a worker's former state. is_answer: to a credit, and not on its own.

    needs_role: the worker must keep its role.
    """

    num_former: int
    is_answer: bool = True
    needs_role: bool = False


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
    down: tuple[tuple[tuple[Role | Credit, ...], ...], ...]
    up: tuple[tuple[tuple[Report, ...], ...], ...]
    requests: tuple[Request, ...]
    changes: tuple[tuple[int, str], ...]


def first_world(scenario: FlipScenario) -> FlipWorld:
    """Return the world in which every router has received the credit of every worker."""
    routers = range(scenario.num_routers)
    none = (0,) * scenario.num_routers
    no_router = (False,) * scenario.num_routers
    return FlipWorld(
        tuple(Worker(role, role, none, none, no_router) for role in scenario.roles),
        tuple(tuple(Seen(role, FULL) for role in scenario.roles) for _ in routers),
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
    """Return production's record of a worker. The epoch of a role counts the roles before it."""
    lifecycle = Lifecycle(worker.former_role, ROLES)
    lifecycle.on_attach()
    lifecycle.set_role(worker.role, worker.num_roles - 1)
    if worker.is_draining:
        lifecycle.drain()
    lifecycle.num_drains = worker.num_drains
    lifecycle.next_role = worker.next_role
    lifecycle.is_unsettled = worker.is_unsettled
    return lifecycle


def with_lifecycle(worker: Worker, lifecycle: Lifecycle) -> Worker:
    """Return a worker whose state is that of production's record. Drains are counted only while its role is to change."""
    return worker._replace(
        role=lifecycle.role,
        former_role=lifecycle._former_role,
        num_drains=lifecycle.num_drains if worker.order else 0,
        next_role=lifecycle.next_role,
        is_draining=lifecycle.is_draining,
        is_unsettled=lifecycle.is_unsettled,
        num_roles=lifecycle.role_epoch + 1,
    )


def order_of(worker: Worker) -> RoleOrder:
    """Return the order that a worker carries out."""
    assert worker.order is not None
    return RoleOrder(role=worker.order.value, epoch=worker.num_roles)


@cache
def flip_step(rules: FlipRules, worker: Worker) -> FlipStep:
    """Return production's next step of a worker whose role is to change."""
    lifecycle = lifecycle_of(worker)
    lifecycle.is_unsettled = worker.is_unsettled and rules.flips_settled
    return next_flip_step(lifecycle, order_of(worker), 0, _answers(rules, worker))


def settling_step(rules: FlipRules, world: "FlipWorld", index: int) -> SettlingStep:
    """Return production's next step of a worker between settled and unsettled."""
    num_leases = _num_bound(index, (one.send for one in world.requests if one.phase == "bound"))
    num_fetches = _num_bound(index, (one.receive for one in world.requests if one.phase == "bound"))
    return _settling_step(rules, world.workers[index], num_leases, num_fetches)


@cache
def _settling_step(rules: FlipRules, worker: Worker, num_leases: int, num_fetches: int) -> SettlingStep:
    mixed = ROLES[worker.role].has_mixed_kv(num_leases=num_leases, num_fetches=num_fetches)
    return next_settling_step(lifecycle_of(worker), _answers(rules, worker), lambda: mixed)


def _answers(rules: FlipRules, worker: Worker) -> Answers:
    num_former = sum(worker.former) if rules.waits_for_former else 0
    return Answers(not any(worker.unanswered), num_former, any(worker.needing))


def _num_bound(index: int, parts: "Iterator[Part | None]") -> int:
    return sum(part is not None and part.worker == index and part.state != "call" for part in parts)


def call_of(part_is_sending: bool) -> LegCall:
    """Return the call that starts a leg."""
    return LegCall.PREFILL if part_is_sending else LegCall.DECODE


def sent(world: FlipWorld, index: int, worker: Worker, *, has_role: bool = False) -> FlipWorld:
    """Return the world in which a worker has changed, and sends every router its credit, behind a role that it has taken."""
    credit = replace(lifecycle_of(worker).credit(FULL), number=1)
    messages = (worker.role, credit) if has_role else (credit,)
    down = with_item(world.down, index, tuple((*queue, *messages) for queue in world.down[index]))
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


def source_of(request: Request) -> int | None:
    """Return the worker that an answer is being moved away from, None without a move; see ``Migrator``."""
    part = request.receive if request.target else request.send if request.is_moved else None
    return part.worker if part else None


def refuse_unserved(worker: Worker, *, is_sending: bool) -> None:
    """Raise LawBrokenError if a worker does not serve the call that starts a leg."""
    if lifecycle_of(worker).reader_of(call_of(is_sending)) is None:
        raise LawBrokenError(f"a {worker.role.value} worker refuses a leg that was bound by its former role")
