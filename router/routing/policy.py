"""The choice of workers for a request, and when they have room for it: pure functions over the workers' views.

A request goes to one worker for each leg of its plan, or to one worker that has all roles if that one has less to do. Of
the candidates for a leg the least loaded one is chosen; equally loaded ones take turns. A worker has room as long as its
credit, which it reports itself, is not used up. A request is never place_legs where it does not fit.

A decision looks at the workers of a role in the order of their load, until one has room. What a request fits is decided for
each size of worker, and not for each worker.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import chain, pairwise, permutations, product
from operator import itemgetter

import msgspec

from contract.identity import Role
from contract.membership import Credit
from router.routing.legs import GENERATION, Placement, RequestPlan, place_legs
from router.routing.views import RankedView, WorkerSize, WorkerView, WorkerViews, is_full, longest


def missing_roles(roles: Iterable[Role], *, embeds_only: bool) -> frozenset[Role]:
    """Return the roles that requests need and that are not among ``roles``."""
    present = frozenset(roles)
    needed = frozenset({Role.PREFILL} if embeds_only else {Role.PREFILL, Role.DECODE})
    return frozenset() if Role.AGGREGATED in present else needed - present


def is_role_needed(
    role: Role, next_role: Role, others: Iterable[tuple[Role, bool]], *, embeds_only: bool
) -> bool:
    """Return True if a worker must keep ``role``: without it a role may be missing that is not missing with it.

    others: the roles of the other workers, each with True if this router has agreed to a change that is not over. Such a
    worker may take its next role or keep its present one, so neither counts.
    """
    staying = {one for one, changes in others if not changes}
    # a role that is missing anyway is no reason to refuse a change
    before = missing_roles({role, *staying}, embeds_only=embeds_only)
    return bool(missing_roles({next_role, *staying}, embeds_only=embeds_only) - before)


Pairs = frozenset[tuple[str, str]]
"""Pairs of worker ids, sender first."""
_NONE: frozenset[str] = frozenset()


class PlacementRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The needs of a request, and what its earlier attempts have shown.

    num_prompt_tokens: with the tokens that were delivered already (num_delivered). num_answer_tokens: kept free for each of
    num_choices answers where the request ends. plan: the legs that it needs. max_length: tokens that prompt and answer have
    together at the most; with may_be_cut a worker that ends the answer earlier is chosen if no other is attached for a
    while. prefer: the prefill worker whose prefix cache holds the prompt. avoid: workers where an earlier attempt failed;
    they are chosen only if no other worker has their role, even if none has room. too_small: workers that rejected the
    request because of its length, and others that must not be chosen. full: workers that count as full whenever the
    request is considered, which may change while it waits; None for nearly all requests. is_replay: an earlier attempt was
    begun. is_local: the plan's fallback is required, because handing over KV has failed again and again. may_overdraw: it
    is so short that it is place_legs although all tokens of a worker are promised.
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
    full: Set[str] | None = None
    is_replay: bool = False
    is_local: bool = False
    may_overdraw: bool = False

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
    workers: WorkerViews,
    request: PlacementRequest,
    turn: int,
    unreachable: Pairs = frozenset(),
    taken: Set[str] = _NONE,
) -> Placement | None:
    """Choose the workers of one request; return None while none has room. ``turn`` counts requests, to break ties.

    unreachable: pairs that must not hand over KV. A decode worker that no prefill worker reaches computes prompts itself.
    taken: workers whose room an earlier request waits for.
    """
    sizes = _fitting(workers, request)
    plan = _plan_now(workers, sizes, request)
    choice = _Choice(workers, request, plan, sizes, taken)
    alone = next(choice.by_load(Role.AGGREGATED, turn), None)
    # the load of a later leg's worker counts more, since the request stays there longer: so the last leg chooses first
    last_first = plan.roles[::-1]
    chosen: Sequence[WorkerView] = ()
    if not unreachable:
        found: list[WorkerView] = []
        for role in last_first:
            if (worker := next(choice.by_load(role, turn), None)) is None:
                break
            found.append(worker)
        else:
            chosen = found[::-1]
    else:
        # pairs matter only here, and unreachable ones are few and rare: otherwise the roles are independent of each other
        for several in product(*(list(choice.by_load(role, turn)) for role in last_first)):
            if unreachable.isdisjoint(pairwise(worker.worker_id for worker in several[::-1])):
                chosen = several[::-1]
                break
    if chosen and not (alone and _is_less_busy(alone, chosen, plan, request)):
        legs = [(kind, worker.worker_id) for (kind, _), worker in zip(plan.legs, chosen, strict=True)]
        return place_legs(*legs, num_delivered=request.num_delivered)
    if alone:
        return place_legs((plan.alone, alone.worker_id), num_delivered=request.num_delivered)
    if unreached := _unreached(choice, turn, unreachable):
        return place_legs((plan.alone, unreached.worker_id), num_delivered=request.num_delivered)
    return None


def never_bound(workers: WorkerViews) -> Pairs:
    """Return the pairs between which no hand-over is bound: both may lend and fetch at once (law 4)."""
    return frozenset(permutations(workers.unsettled, 2)) if len(workers.unsettled) > 1 else frozenset()


def never_moved_to(
    workers: WorkerViews, source: str, sources: Iterable[str], unreachable: Pairs
) -> frozenset[str]:
    """Return the ids of the workers to which no answer is moved from ``source``.

    sources: workers that answers are being moved away from. They, and unsettled workers, are no target: two workers that
    lend to each other could both wait for blocks (law 4).
    """
    # only pairs from this source: an answer is moved from it and from nowhere else
    unreached = {target for sender, target in unreachable if sender == source}
    return frozenset({source, *sources, *unreached, *workers.unsettled})


def decodes_no_more(role: Role, credit: Credit) -> bool:
    """Return True for an unsettled worker that is to decode no more: it drains, or has become a prefill worker."""
    return credit.is_unsettled and (credit.is_draining or role is Role.PREFILL)


def fits(worker: WorkerSize, request: PlacementRequest) -> bool:
    """Return True if workers of this size can take a leg of the request at all, whatever else they have to do now."""
    if not worker.has_credit:
        return False
    is_prefill = worker.role is Role.PREFILL
    draws_more = request.plan.emits_tokens and not is_prefill
    if request.num_prompt_tokens + draws_more > worker.pool_tokens:
        return False
    most = request.least_length
    if is_prefill:  # it draws the first token only, which must not be the last one for lack of space
        return min(request.num_prompt_tokens + 2, most) <= worker.max_length
    return most <= worker.max_length


def candidates(workers: WorkerViews, request: PlacementRequest) -> frozenset[str]:
    """Return the ids of the workers that may take a leg of the request; empty if it could end on none of them."""
    roles = {*request.plan.roles, Role.AGGREGATED}
    able = [size for size in _fitting(workers, request) if size.role in roles]
    end_roles = request.plan.end_roles
    if not any(size.role in end_roles and workers.of_size(size) - request.too_small for size in able):
        return _NONE
    found = workers.members(frozenset(able))
    return found - request.too_small if request.too_small else found


def awaited(workers: WorkerViews, request: PlacementRequest, taken: Set[str] = _NONE) -> frozenset[str]:
    """Return the ids of the workers that a request without room waits for, so that no later request takes their room.

    These are the workers on which it can end, and those of its earlier legs if none of them has room; none that is full for
    this request only. taken: workers that count as full.
    """
    able = _fitting(workers, request)
    waits = [size for size in able if size.role in request.plan.end_roles]
    choice = _Choice(workers, request, request.plan, able, taken)
    earlier = request.plan.roles[:-1]
    if not any(choice.has_room(ranked) for role in earlier for ranked in workers.ranked(role)):
        waits += [size for size in able if size.role in earlier]
    return workers.members(frozenset(waits)).difference(request.too_small, request.full or _NONE)


def why_too_long(workers: WorkerViews, request: PlacementRequest) -> str:
    """Describe why none of the workers can take the request."""
    most = longest(size for size in workers.sizes if size.has_credit)
    return (
        f"no attached worker takes {request.least_length} tokens of prompt and answer together; "
        f"the limit is {most or 0} now"
    )


def missing_role(workers: Iterable[WorkerSize], plan: RequestPlan = GENERATION) -> str | None:
    """Describe the roles that no worker has; return None if a request of this plan can be place_legs sooner or later."""
    roles = {worker.role for worker in workers if worker.has_credit}
    if Role.AGGREGATED in roles or roles.issuperset(plan.roles):
        return None
    missing = [role.value for role in plan.named_roles or plan.roles if role not in roles]
    return f"no {' and no '.join(missing)} worker is attached"


class _Choice:
    """One decision for a request: which workers may take its legs.

    sizes: the sizes of worker that the request fits. taken: workers that count as full.
    """

    def __init__(
        self,
        workers: WorkerViews,
        request: PlacementRequest,
        plan: RequestPlan,
        sizes: Set[WorkerSize],
        taken: Set[str],
    ) -> None:
        self.plan = plan
        self._workers = workers
        self._request = request
        self._sizes = sizes
        self._taken = taken

    def able(self, role: Role) -> list[WorkerView]:
        """Return the workers of a role that can take the request, whether they have room or not."""
        excluded = self._excluded(role) if self._request.avoid else self._request.too_small
        return [
            ranked.view
            for ranked in self._workers.ranked(role)
            if ranked.size in self._sizes and ranked.view.worker_id not in excluded
        ]

    def has_room(self, worker: RankedView, excluded: Set[str] = _NONE) -> bool:
        """Return True if the worker can take the request, is not excluded, and has credit for it or nothing to do.

        A prefill worker takes another prompt while its queue is below its limit; other workers if the whole request fits.
        Each choice is a leg, so several choices begin beside other requests only if there is credit for all of them.
        """
        request = self._request
        view = worker.view
        worker_id = view.worker_id
        if (
            worker.size not in self._sizes
            or worker_id in self._taken
            or (request.full is not None and worker_id in request.full)
            or worker_id in request.too_small
            or worker_id in excluded
        ):
            return False
        # without this a request with more tokens than the whole credit would wait for ever
        if view.num_requests == 0:
            return view.max_requests > 0
        if view.num_requests + request.num_choices > view.max_requests:
            return False
        if request.may_overdraw:
            return True
        if view.role is Role.PREFILL:
            return view.num_tokens < view.max_tokens
        needed = view.num_tokens + request.num_tokens
        return needed <= view.max_tokens and not is_full(view.kv_cache_usage)

    def by_load(self, role: Role, turn: int) -> Iterator[WorkerView]:
        """Yield the workers of a role that have room, least loaded first. Equal ones begin with another one each turn.

        The prefill worker whose cache holds the prompt goes before all.
        """
        excluded = self._excluded(role) if self._request.avoid else _NONE
        if self._request.prefer and role is Role.PREFILL:
            preferred = self._workers.get(self._request.prefer)
            # by its size, since it may have another role by now
            if preferred and preferred.size.role is role and self.has_room(preferred, excluded):
                yield preferred.view
                excluded |= {preferred.view.worker_id}
        ranked = self._workers.ranked(role)
        first = 0
        while first < len(ranked) and not self.has_room(ranked[first], excluded):
            first += 1
        if first == len(ranked):
            return
        end = bisect_right(ranked, ranked[first].load, lo=first, key=itemgetter(0))
        start = first + turn % (end - first)
        for number in chain(range(start, end), range(first, start), range(end, len(ranked))):
            # the search above has asked the first one already
            if number == first or self.has_room(ranked[number], excluded):
                yield ranked[number].view

    def _excluded(self, role: Role) -> frozenset[str]:
        """Return the ids of workers that must not take a leg in this role, if some are to be avoided.

        Avoided workers are not excluded if no others have the role, and the others do not suffice without it.
        """
        request = self._request
        excluded = request.too_small | request.avoid
        trusted = [size for size in self._sizes if self._workers.of_size(size) - excluded]
        # a request whose only possible worker has failed it once tries it again, and does not fail
        if any(size.role is role for size in trusted) or missing_role(trusted, request.plan) is None:
            return excluded
        return request.too_small


def _fitting(workers: WorkerViews, request: PlacementRequest) -> frozenset[WorkerSize]:
    """Return the sizes of worker that a request fits."""
    # nearly every request fits every worker, and then no size has to be looked at; + 2: see ``fits``
    if max(request.num_prompt_tokens + 2, request.least_length) <= workers.common_length:
        return workers.sizes
    return frozenset([size for size in workers.sizes if fits(size, request)])


def _plan_now(workers: WorkerViews, sizes: Set[WorkerSize], request: PlacementRequest) -> RequestPlan:
    """Return the fallback of the request's plan if no worker can take the first leg, for its length or at all.

    New requests wait for a worker of that role if none is attached, because one may be starting again.
    """
    plan = request.plan
    if plan.fallback is None:
        return plan
    if request.is_local:
        return plan.fallback
    first = plan.roles[0]
    for size in sizes:
        if size.role is first and workers.of_size(size) - request.too_small:
            return plan
    # a worker that is too small now will not grow, while one that is missing may be starting
    is_attached = any(size.role is first and size.has_credit for size in workers.sizes)
    return plan.fallback if request.is_replay or is_attached else plan


def _is_less_busy(
    alone: WorkerView, chosen: Sequence[WorkerView], plan: RequestPlan, request: PlacementRequest
) -> bool:
    """Return True if one worker with all roles is less busy than the ones that were chosen for the legs."""
    if plan.prefers_legs:
        return False
    if len(chosen) == 1:
        avoid = request.avoid
        one = chosen[0]
        return (alone.worker_id in avoid, alone.load) < (one.worker_id in avoid, one.load)
    return alone.num_tokens < max(worker.num_tokens for worker in chosen)


def _unreached(choice: _Choice, turn: int, unreachable: Pairs) -> WorkerView | None:
    """Return a worker for the last leg that none of the workers which may be chosen for the leg before can reach."""
    if len(choice.plan.legs) == 1 or not unreachable:
        return None
    *_, before, last = choice.plan.roles
    senders = choice.able(before)
    for worker in choice.by_load(last, turn):
        # its prompt need not wait for a hand-over that cannot happen: the worker computes it itself
        if senders and all((sender.worker_id, worker.worker_id) in unreachable for sender in senders):
            return worker
    return None
