"""The choice of workers for a request, and when they have room for it: pure functions over a snapshot.

A request goes to one worker for each leg of its plan, or to one worker that has all roles if that one has less to do. Of
the candidates for a leg the least loaded one is chosen; equally loaded ones take turns. A worker has room as long as its
credit, which it reports itself, is not used up. A request is never placed where it does not fit.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from contract.identity import Role
from router.legs import GENERATION, Placement, RequestPlan, placed

_FULL = 0.95
"""Used share of a KV pool from which on it gets no new request: the running ones still grow."""
UNLIMITED = 2**62

Pairs = frozenset[tuple[str, str]]
"""Pairs of worker ids, sender first."""


@dataclass(frozen=True, kw_only=True)
class WorkerView:
    """A worker as a policy reads it.

    num_requests, num_tokens: legs of this router that are bound to it, or will be. max_requests, max_tokens: its credit, or
    this router's share of it. waits_for_credit: the credit is 0 only because other routers hold all of it.
    max_length: tokens that a request may have there, answer included. pool_tokens: tokens that its KV pool holds. The other
    fields are what it reports itself.
    """

    worker_id: str
    role: Role
    num_requests: int = 0
    num_tokens: int = 0
    max_requests: int = 0
    max_tokens: int = 0
    waits_for_credit: bool = False
    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    max_length: int = UNLIMITED
    pool_tokens: int = UNLIMITED

    @property
    def serves(self) -> bool:
        """True if it takes requests of this router, now or as soon as there is credit for it."""
        return self.max_requests > 0 or self.waits_for_credit


@dataclass(frozen=True, kw_only=True)
class PlacementRequest:
    """The needs of a request, and what its earlier attempts have shown.

    num_prompt_tokens: with the tokens that were delivered already (num_delivered). num_answer_tokens: kept free for each of
    num_choices answers where the request ends. plan: the legs that it needs. max_length: tokens that prompt and answer have
    together at the most; with may_be_cut a worker that ends the answer earlier is chosen if no other is attached for a
    while. prefer: the prefill worker whose prefix cache holds the prompt. avoid: workers where an earlier attempt failed;
    they are chosen only if no other worker has their role, even if none has room. too_small: workers that rejected the
    request because of its length. is_replay: an earlier attempt was begun. is_local: the plan's fallback is required,
    because handing over KV has failed again and again.
    """

    num_prompt_tokens: int
    num_answer_tokens: int
    num_delivered: int = 0
    num_choices: int = 1
    plan: RequestPlan = GENERATION
    max_length: int = 0
    may_be_cut: bool = False
    prefer: str | None = None
    avoid: frozenset[str] = frozenset()
    too_small: frozenset[str] = frozenset()
    is_replay: bool = False
    is_local: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens that it takes where it ends: the prompt, and room for all answers."""
        return self.num_prompt_tokens + self.num_choices * self.num_answer_tokens

    @property
    def least_length(self) -> int:
        """Tokens of prompt and answer that a worker on which it ends must be able to hold."""
        return max(self.num_prompt_tokens + self.plan.emits_tokens, self.max_length)

    @property
    def least_plan(self) -> RequestPlan:
        """The plan that needs the fewest roles and can still serve the request."""
        return self.plan.fallback if self.is_replay and self.plan.fallback else self.plan


def place(
    workers: Sequence[WorkerView], request: PlacementRequest, turn: int, unreachable: Pairs = frozenset()
) -> Placement | None:
    """Choose the workers of one request; return None while none has room. ``turn`` counts requests, to break ties.

    unreachable: pairs that cannot hand over KV now. A decode worker that no prefill worker reaches computes prompts itself.
    """
    able = [worker for worker in workers if fits(worker, request)]
    plan = _plan_now(workers, able, request)
    workers = _trusted(able, request)
    alone = next(iter(_by_load(workers, Role.AGGREGATED, request, turn)), None)
    chosen = _one_for_each_leg(workers, plan, request, turn, unreachable)
    if chosen and not (alone and _is_less_busy(alone, chosen, plan, request)):
        legs = [(kind, worker.worker_id) for (kind, _), worker in zip(plan.legs, chosen, strict=True)]
        return placed(*legs, num_delivered=request.num_delivered)
    if alone:
        return placed((plan.alone, alone.worker_id), num_delivered=request.num_delivered)
    if unreached := _unreached(workers, plan, request, turn, unreachable):
        return placed((plan.alone, unreached.worker_id), num_delivered=request.num_delivered)
    return None


def fits(worker: WorkerView, request: PlacementRequest) -> bool:
    """Return True if the worker can take a leg of the request at all, whatever else it has to do now."""
    if not worker.serves or worker.worker_id in request.too_small:
        return False
    is_prefill = worker.role is Role.PREFILL
    draws_more = request.plan.emits_tokens and not is_prefill
    if request.num_prompt_tokens + draws_more > worker.pool_tokens:
        return False
    most = request.least_length
    if is_prefill:  # it draws the first token only, which must not be the last one for lack of space
        return min(request.num_prompt_tokens + 2, most) <= worker.max_length
    return most <= worker.max_length


def candidates(workers: Iterable[WorkerView], request: PlacementRequest) -> frozenset[str]:
    """Return the ids of the workers that may take a leg of the request; empty if it could end on none of them."""
    roles = {*request.plan.roles, Role.AGGREGATED}
    able = [worker for worker in workers if worker.role in roles and fits(worker, request)]
    if not any(worker.role in request.plan.end_roles for worker in able):
        return frozenset()
    return frozenset(worker.worker_id for worker in able)


def awaited(workers: Sequence[WorkerView], request: PlacementRequest) -> frozenset[str]:
    """Return the ids of the workers that a request without room waits for, so that no later request takes their room.

    These are the workers on which it can end, and those of its earlier legs if none of them has room.
    """
    able = [worker for worker in workers if fits(worker, request)]
    ends = [worker for worker in able if worker.role in request.plan.end_roles]
    earlier = [worker for worker in able if worker.role in request.plan.roles[:-1]]
    if any(_has_room(worker, request) for worker in earlier):
        earlier = []
    return frozenset(worker.worker_id for worker in (*earlier, *ends))


def why_too_long(workers: Iterable[WorkerView], request: PlacementRequest) -> str:
    """Describe why none of the workers can take the request."""
    most = longest(worker for worker in workers if worker.serves)
    return (
        f"no attached worker takes {request.least_length} tokens of prompt and answer together; "
        f"the limit is {most or 0} now"
    )


def longest(workers: Iterable[WorkerView]) -> int | None:
    """Return how many tokens prompt and answer may have together on the largest worker or pair; None without any."""
    most: dict[Role, int] = {}
    for worker in workers:
        most[worker.role] = max(most.get(worker.role, 0), worker.max_length)
    pair = [most[role] for role in (Role.PREFILL, Role.DECODE) if role in most]
    options = [*([min(pair)] if pair else []), *([most[Role.AGGREGATED]] if Role.AGGREGATED in most else [])]
    return max(options, default=None)


def is_full(kv_cache_usage: float) -> bool:
    """Return True if a KV cache takes no further request."""
    return kv_cache_usage >= _FULL


def missing_role(workers: Sequence[WorkerView], plan: RequestPlan = GENERATION) -> str | None:
    """Describe the roles that no worker has; return None if a request of this plan can be placed sooner or later."""
    roles = {worker.role for worker in workers if worker.serves}
    if Role.AGGREGATED in roles or roles.issuperset(plan.roles):
        return None
    missing = [role.value for role in plan.named_roles or plan.roles if role not in roles]
    return f"no {' and no '.join(missing)} worker is attached"


def _plan_now(
    workers: Sequence[WorkerView], able: Sequence[WorkerView], request: PlacementRequest
) -> RequestPlan:
    """Return the fallback of the request's plan if no worker can take the first leg, for its length or at all.

    New requests wait for a worker of that role if none is attached, because one may be starting again.
    """
    plan = request.plan
    if plan.fallback is None:
        return plan
    first = plan.roles[0]
    is_able = any(worker.role is first for worker in able)
    is_attached = any(worker.role is first and worker.serves for worker in workers)
    falls_back = request.is_local or (not is_able and (request.is_replay or is_attached))
    return plan.fallback if falls_back else plan


def _trusted(workers: Sequence[WorkerView], request: PlacementRequest) -> Sequence[WorkerView]:
    """Return the workers that are not avoided if they suffice without the others, else all."""
    trusted = [worker for worker in workers if worker.worker_id not in request.avoid]
    return workers if missing_role(trusted, request.plan) else trusted


def _one_for_each_leg(
    workers: Sequence[WorkerView], plan: RequestPlan, request: PlacementRequest, turn: int, unreachable: Pairs
) -> tuple[WorkerView, ...] | None:
    """Return the least loaded workers that have room for the legs and reach each other; None without such workers.

    The load of a later leg's worker counts more: the request stays there longer.
    """
    last_first = [_by_load(workers, role, request, turn) for role in reversed(plan.roles)]
    for chosen in product(*last_first):
        in_order = chosen[::-1]
        pairs = pairwise(worker.worker_id for worker in in_order)
        if unreachable.isdisjoint(pairs):
            return in_order
    return None


def _is_less_busy(
    alone: WorkerView, chosen: Sequence[WorkerView], plan: RequestPlan, request: PlacementRequest
) -> bool:
    """Return True if one worker with all roles is less busy than the ones that were chosen for the legs."""
    if plan.prefers_legs:
        return False
    if len(chosen) == 1:
        return _load(alone, request) < _load(chosen[0], request)
    return alone.num_tokens < max(worker.num_tokens for worker in chosen)


def _unreached(
    workers: Sequence[WorkerView], plan: RequestPlan, request: PlacementRequest, turn: int, unreachable: Pairs
) -> WorkerView | None:
    """Return a worker for the last leg that none of the workers which may be chosen for the leg before can reach."""
    if len(plan.legs) == 1:
        return None
    *_, before, last = plan.roles
    senders = _of_role(workers, before, request)
    for worker in _by_load(workers, last, request, turn):
        if senders and all((sender.worker_id, worker.worker_id) in unreachable for sender in senders):
            return worker
    return None


def _of_role(workers: Sequence[WorkerView], role: Role, request: PlacementRequest) -> list[WorkerView]:
    able = [worker for worker in workers if worker.role is role]
    return [worker for worker in able if worker.worker_id not in request.avoid] or able


def _by_load(
    workers: Sequence[WorkerView], role: Role, request: PlacementRequest, turn: int
) -> list[WorkerView]:
    """Return the workers of a role that have room, least loaded first. Equal ones begin with another one each turn."""
    having_room = [worker for worker in _of_role(workers, role, request) if _has_room(worker, request)]
    ranked = sorted(having_room, key=lambda worker: _load(worker, request))
    num_equals = sum(_load(worker, request) == _load(ranked[0], request) for worker in ranked)
    start = turn % num_equals if num_equals else 0
    return [*ranked[start:num_equals], *ranked[:start], *ranked[num_equals:]]


def _has_room(worker: WorkerView, request: PlacementRequest) -> bool:
    """Return True if the worker's credit reaches for the request, or if it has nothing to do.

    A prefill worker takes another prompt while its queue is below its limit; other workers if the whole request fits.
    """
    if worker.num_requests >= worker.max_requests:
        return False
    if worker.num_requests == 0:
        return True
    if worker.role is Role.PREFILL:
        return worker.num_tokens < worker.max_tokens
    needed = worker.num_tokens + request.num_tokens
    return needed <= worker.max_tokens and not is_full(worker.kv_cache_usage)


def _load(worker: WorkerView, request: PlacementRequest) -> tuple[bool, bool, int, int, float]:
    return (
        worker.worker_id in request.avoid,
        worker.role is Role.PREFILL and worker.worker_id != request.prefer,
        worker.num_tokens,
        worker.num_waiting + worker.num_running,
        round(worker.kv_cache_usage, 2),
    )
