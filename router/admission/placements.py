"""The workers of each request that is admitted, within the limits of its client."""

from collections import Counter
from collections.abc import Set

from msgspec import structs

from router.admission.fair_queue import QueueOrder, StartRule
from router.admission.lanes import Lane, WaitingRequest
from router.admission.reservation import Reservation
from router.admission.start_limiter import StartLimiter
from router.admission.unreachable_pairs import UnreachablePairs
from router.routing.legs import CONTINUATION
from router.routing.policy import Pairs, PlacementRequest, never_bound, place
from router.routing.running_shares import RunningShares, TotalCredit
from router.workers.registry import Registry

_NONE: frozenset[str] = frozenset()


class Placements:
    """Decides which client may begin a request, chooses the workers, and holds their credit.

    It owns the number of placements, by which equally loaded workers take turns. decisions: their number, by the kinds of
    the first and the last leg.
    """

    def __init__(
        self, registry: Registry, unreachable: UnreachablePairs, shares: RunningShares, starts: StartLimiter
    ) -> None:
        self._registry = registry
        self._unreachable = unreachable
        self._shares = shares
        self._starts = starts
        self._turn = 0
        self.decisions: Counter[tuple[str, str]] = Counter()

    def total_credit(self) -> TotalCredit:
        """Return the credit of the workers that decode, which bounds what each client runs and starts."""
        use = self._registry.decoding()
        self._starts.num_workers = use.num_workers
        return use

    def may_start(self, request: PlacementRequest, order: QueueOrder, use: TotalCredit) -> bool:
        """Return False for a request of a client that holds its share, or starts enough already."""
        if not self._starts.may_start(order.tenant):
            return False
        if self._is_unbounded(request):
            return True
        return self._num_to_begin(request, order, use) > 0

    @staticmethod
    def _is_unbounded(request: PlacementRequest) -> bool:
        """Return True for an embedding, since shares are of workers that decode, and for a moved answer, which has one."""
        return not request.plan.emits_tokens or request.plan is CONTINUATION

    def _num_to_begin(self, request: PlacementRequest, order: QueueOrder, use: TotalCredit) -> int:
        return self._shares.num_to_begin(
            order.tenant, request.num_choices, request.num_prompt_tokens, request.num_answer_tokens, use
        )

    def start_rule(self) -> StartRule[Lane, WaitingRequest]:
        """Return the rule of now by which a client that ``may_start`` nothing is overtaken."""
        use = self.total_credit()
        return lambda entry: self.may_start(entry.item.request, entry.order, use)

    def blocked_pairs(self) -> Pairs:
        """Return the pairs of workers between which nothing is handed over now."""
        unreachable = never_bound(self._registry.views)
        if len(self._unreachable):
            unreachable |= self._unreachable.blocked(self._registry.workers)
        return unreachable

    def reserve(
        self, request: PlacementRequest, order: QueueOrder, unreachable: Pairs, taken: Set[str] = _NONE
    ) -> Reservation | None:
        """Choose workers, hold their credit, and count the request as a start and as a probe of its pair.

        Returns None while no workers have room. The reservation is for as many of the request's choices as its client
        ``may_start`` now. taken: workers that count as full.
        """
        use = self.total_credit()
        if request.num_choices > 1 and not self._is_unbounded(request):
            number = max(1, self._num_to_begin(request, order, use))
            request = structs.replace(request, num_choices=number)
        placement = place(self._registry.views, request, self._turn, unreachable, taken)
        if placement is None and self._shares.may_overdraw(
            order.tenant, request.num_choices, request.num_tokens, use
        ):
            request = structs.replace(request, may_overdraw=True)
            placement = place(self._registry.views, request, self._turn, unreachable, taken)
        if placement is None:
            return None
        self._turn += 1
        legs = placement.legs
        self.decisions[legs[0].kind, legs[-1].kind] += 1
        workers = [self._registry.get(leg.worker) for leg in legs]
        if pair := placement.hand_over:
            self._unreachable.record_probe(*map(self._registry.get, pair))
        is_alone = self._shares.is_alone(order.tenant, self._registry.held)
        start = self._starts.start(order.tenant, is_alone=is_alone)
        return Reservation(placement, workers, request, order.tenant, start)
