"""The order in which waiting requests get workers: by priority, then fair between clients; nobody starves. Pure.

1. Higher priorities go first. Within a priority those that were begun before go first, by their arrival.
2. The others are shared out fairly. Each client (tenant) has a virtual time, which grows by the cost of what is begun for
   it; the client with the lowest is next. One that had nothing waiting begins at the time of those that were served last,
   so it can save up nothing. (Start-time fair queueing, Goyal et al. 1996.)
3. Within a client its requests are shared out the same way: the prompts of one request are begun in turns with those of
   the client's other requests.
4. Every eighth turn the priority does not count, so a request of a low priority is passed by at most seven others for
   each one that its client's share lets go first.
5. ``BACKGROUND_PRIORITY`` is left out of that: it goes when nobody else waits, and nobody is charged for it, so that a
   client's batch does not put its other requests behind those of other clients.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from router.request import BACKGROUND_PRIORITY

AGING_PERIOD = 8
_L = TypeVar("_L")
_T = TypeVar("_T")
_BEGUN = -1.0
"""Tag of a request that was begun before: it keeps its place in front of all that were not."""


@dataclass(frozen=True, kw_only=True)
class QueueOrder:
    """Who asks for workers.

    tenant: the client. family: the client's request that this is a part of. cost: tokens, or what else work is counted in.
    is_replay: it was begun before, and is charged nothing again.
    """

    priority: int = 0
    tenant: str = ""
    family: str = ""
    arrival: float = 0.0
    cost: float = 1.0
    is_replay: bool = False


@dataclass(order=True)
class QueueEntry(Generic[_L, _T]):
    """A place in the queue. Sorted among those of the same client and priority."""

    tag: float
    arrival: float
    number: int
    claim: QueueOrder = field(compare=False)
    lane: _L = field(compare=False)
    item: _T = field(compare=False)


StartRule = Callable[[QueueEntry[_L, _T]], bool]


@dataclass
class _Family:
    """One request's prompts that wait. tag: where its next one stands."""

    num_waiting: int = 0
    tag: float = 0.0


@dataclass
class _Tenant:
    """One client's clocks. virtual_time: among all clients. own_time: among its own requests."""

    virtual_time: float = 0.0
    own_time: float = 0.0
    families: dict[str, _Family] = field(default_factory=dict)

    def tag_for(self, claim: QueueOrder) -> float:
        family = self.families.setdefault(claim.family, _Family(tag=self.own_time))
        family.num_waiting += 1
        tag = max(family.tag, self.own_time)
        family.tag = tag + claim.cost
        return tag

    def leave(self, claim: QueueOrder, cost: float) -> None:
        self.own_time += cost / len(self.families)
        family = self.families[claim.family]
        family.num_waiting -= 1
        if not family.num_waiting:
            del self.families[claim.family]


class FairQueue(Generic[_L, _T]):
    """Owns the waiting requests, in lanes: those in one lane wait for the same workers, so nobody passes its head."""

    def __init__(self) -> None:
        self._lanes: dict[_L, dict[int, dict[str, list[QueueEntry[_L, _T]]]]] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._num_tickets = 0
        self._num_waiting = 0
        self._time = 0.0
        self._turn = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[QueueEntry[_L, _T]]:
        for priorities in self._lanes.values():
            for tenants in priorities.values():
                for tickets in tenants.values():
                    yield from tickets

    def add(self, lane: _L, claim: QueueOrder, item: _T) -> QueueEntry[_L, _T]:
        """Take a request in."""
        tenant = self._tenants.setdefault(claim.tenant, _Tenant(virtual_time=self._time))
        if not tenant.families:
            tenant.virtual_time = max(tenant.virtual_time, self._time)
            tenant.own_time = 0.0
        tag = tenant.tag_for(claim)
        self._num_tickets += 1
        ticket = QueueEntry(
            _BEGUN if claim.is_replay else tag, claim.arrival, self._num_tickets, claim, lane, item
        )
        self._put(ticket)
        self._num_waiting += 1
        return ticket

    def heads(self, may_start: StartRule[_L, _T] = lambda ticket: True) -> list[QueueEntry[_L, _T]]:
        """Return the head of each lane that has one, the one that goes first in front."""
        heads = [head for lane in self._lanes if (head := self.head(lane, may_start))]
        return sorted(heads, key=self._rank)

    def head(self, lane: _L, may_start: StartRule[_L, _T] = lambda ticket: True) -> QueueEntry[_L, _T] | None:
        """Return the request that is next in a lane; None if no client may begin one.

        may_start: whether a client's first request may be begun now; where it may not, other clients pass.
        """
        tops = {
            priority: [top for tickets in tenants.values() if may_start(top := tickets[0])]
            for priority, tenants in self._lanes.get(lane, {}).items()
        }
        if self._is_aged_turn:
            aged = [top for priority in tops if priority > BACKGROUND_PRIORITY for top in tops[priority]]
            if aged:
                return min(aged, key=lambda top: (self._virtual_time(top), top.arrival, top.number))
        highest = max((priority for priority, found in tops.items() if found), default=None)
        return None if highest is None else min(tops[highest], key=self._order)

    def take(self, ticket: QueueEntry[_L, _T]) -> None:
        """Begin a request: its client is charged, unless it was begun before or goes in the background."""
        tenant = self._tenants[ticket.claim.tenant]
        claim = ticket.claim
        is_free = claim.is_replay or claim.priority == BACKGROUND_PRIORITY
        cost = 0.0 if is_free else claim.cost
        if cost:
            self._time = max(self._time, tenant.virtual_time)
            tenant.virtual_time += cost
            self._turn += 1
        self._remove(ticket, cost)

    def discard(self, ticket: QueueEntry[_L, _T]) -> None:
        """Take a request out that is not begun: nobody is charged."""
        self._remove(ticket, 0.0)

    def move(self, ticket: QueueEntry[_L, _T], lane: _L) -> None:
        """Let a request wait in another lane; its place among those there is what its arrival gave it."""
        self._pull(ticket)
        ticket.lane = lane
        self._put(ticket)

    @property
    def _is_aged_turn(self) -> bool:
        return self._turn % AGING_PERIOD == AGING_PERIOD - 1

    def _rank(self, head: QueueEntry[_L, _T]) -> tuple[float, bool, float, float, int]:
        is_aged = self._is_aged_turn and head.claim.priority > BACKGROUND_PRIORITY
        priority = float("-inf") if is_aged else -head.claim.priority
        return (priority, *self._order(head))

    def _order(self, top: QueueEntry[_L, _T]) -> tuple[bool, float, float, int]:
        is_fresh = not top.claim.is_replay
        return is_fresh, self._virtual_time(top) if is_fresh else _BEGUN, top.arrival, top.number

    def _virtual_time(self, ticket: QueueEntry[_L, _T]) -> float:
        return self._tenants[ticket.claim.tenant].virtual_time

    def _put(self, ticket: QueueEntry[_L, _T]) -> None:
        claim = ticket.claim
        tenants = self._lanes.setdefault(ticket.lane, {}).setdefault(claim.priority, defaultdict(list))
        insort(tenants[claim.tenant], ticket)

    def _pull(self, ticket: QueueEntry[_L, _T]) -> None:
        claim = ticket.claim
        priorities = self._lanes[ticket.lane]
        tenants = priorities[claim.priority]
        tickets = tenants[claim.tenant]
        del tickets[bisect_left(tickets, ticket)]
        if not tickets:
            del tenants[claim.tenant]
        if not tenants:
            del priorities[claim.priority]
        if not priorities:
            del self._lanes[ticket.lane]

    def _remove(self, ticket: QueueEntry[_L, _T], cost: float) -> None:
        self._pull(ticket)
        self._num_waiting -= 1
        tenant = self._tenants[ticket.claim.tenant]
        tenant.leave(ticket.claim, cost)
        if not tenant.families and tenant.virtual_time <= self._time:
            del self._tenants[ticket.claim.tenant]
