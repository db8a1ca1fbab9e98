"""The order in which waiting requests are admitted: by priority, then fair between clients, without starvation. Pure.

1. Higher priorities go first. Within a priority, requests that were begun before go first, by their arrival.
2. The others are shared out fairly. Each client (tenant) has a virtual time, which grows by the cost of its requests that
   are admitted; the client with the lowest one is next. A client that had nothing waiting starts at the time of those that
   were served last, so that it cannot save up time. (Start-time fair queueing, Goyal et al. 1996.)
3. The requests of one client are shared out in the same way: the prompts of one request take turns with those of the
   client's other requests.
4. At every eighth turn the priority does not count. A request of a low priority is therefore overtaken by at most seven
   others for each one that its client's share admits first.
5. ``BACKGROUND_PRIORITY`` is an exception: it is admitted when no other request waits, and costs nothing, so that a client's
   batch does not put its other requests behind those of other clients.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, TypeVar

import msgspec

from router.intake.request import BACKGROUND_PRIORITY

AGING_PERIOD = 8
_L = TypeVar("_L")
_T = TypeVar("_T")
_BEGUN = -1.0
"""Tag of a request that was begun before: it stays before all that were not."""


class QueueOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The properties of a request that decide when it is admitted.

    tenant: the client. family: the client's request that this is a part of. cost: tokens, or another measure of work.
    is_replay: it was begun before, and costs nothing again.
    """

    priority: int = 0
    tenant: str = ""
    family: str = ""
    arrival: float = 0.0
    cost: float = 1.0
    is_replay: bool = False


@dataclass(eq=False)
class QueueEntry(Generic[_L, _T]):
    """A waiting request. rank: its tag, arrival and number, by which those of the same client and priority are sorted."""

    rank: tuple[float, float, int]
    order: QueueOrder
    lane: _L
    item: _T


_RANK = attrgetter("rank")
StartRule = Callable[[QueueEntry[_L, _T]], bool]


@dataclass
class _Family:
    """The waiting prompts of one request. tag: of its next prompt."""

    num_waiting: int = 0
    tag: float = 0.0


@dataclass
class _Tenant:
    """One client's clocks. virtual_time: among all clients. own_time: among its own requests."""

    virtual_time: float = 0.0
    own_time: float = 0.0
    families: dict[str, _Family] = field(default_factory=dict)

    def leave(self, order: QueueOrder, cost: float) -> None:
        # its families take turns, so its own clock runs the slower the more of them wait
        self.own_time += cost / len(self.families)
        family = self.families[order.family]
        family.num_waiting -= 1
        if not family.num_waiting:
            del self.families[order.family]


class FairQueue(Generic[_L, _T]):
    """Owns the waiting requests, in lanes. Those of one lane wait for the same workers, and none overtakes its head.

    num_waiting: number of all waiting requests.
    """

    def __init__(self) -> None:
        self._lanes: dict[_L, dict[int, dict[str, list[QueueEntry[_L, _T]]]]] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._num_entries = 0
        self.num_waiting = 0
        self._time = 0.0
        self._turn = 0

    def __len__(self) -> int:
        return self.num_waiting

    def __iter__(self) -> Iterator[QueueEntry[_L, _T]]:
        for priorities in self._lanes.values():
            for tenants in priorities.values():
                for entries in tenants.values():
                    yield from entries

    def add(self, lane: _L, order: QueueOrder, item: _T) -> QueueEntry[_L, _T]:
        """Queue a request."""
        tenant = self._tenants.setdefault(order.tenant, _Tenant(virtual_time=self._time))
        # a client that had nothing waiting has not saved up time, or it would pass all others for as long as it was idle
        if not tenant.families:
            tenant.virtual_time = max(tenant.virtual_time, self._time)
            tenant.own_time = 0.0
        family = tenant.families.setdefault(order.family, _Family(tag=tenant.own_time))
        family.num_waiting += 1
        tag = max(family.tag, tenant.own_time)
        family.tag = tag + order.cost
        self._num_entries += 1
        # a replay is in the middle of its answer, so it waits behind no request that its client has not begun
        rank = (_BEGUN if order.is_replay else tag, order.arrival, self._num_entries)
        entry = QueueEntry(rank, order, lane, item)
        self._put(entry)
        self.num_waiting += 1
        return entry

    def heads(self, may_start: StartRule[_L, _T] = lambda entry: True) -> list[QueueEntry[_L, _T]]:
        """Return the head of each lane, in the order in which they are admitted."""
        heads = [head for lane in self._lanes if (head := self.head(lane, may_start))]
        return heads if len(heads) < 2 else sorted(heads, key=self._rank_of_head)

    def head(self, lane: _L, may_start: StartRule[_L, _T] = lambda entry: True) -> QueueEntry[_L, _T] | None:
        """Return the next request of a lane; None if no client may start one.

        may_start: returns False for a client's first request to let other clients overtake it.
        """
        priorities = self._lanes.get(lane, {})
        # one client with one priority is the usual case, and needs no comparison
        if len(priorities) == 1:
            (tenants,) = priorities.values()
            if len(tenants) == 1:
                (entries,) = tenants.values()
                return entries[0] if may_start(entries[0]) else None
        firsts = {
            priority: [first for entries in tenants.values() if may_start(first := entries[0])]
            for priority, tenants in priorities.items()
        }
        if self._is_aged_turn:
            # requests in the background do not age: they wait until the service is idle, however long that takes
            aged = [
                first for priority in firsts if priority > BACKGROUND_PRIORITY for first in firsts[priority]
            ]
            if aged:
                return min(aged, key=lambda entry: (self._virtual_time(entry), *entry.rank[1:]))
        highest = max((priority for priority, found in firsts.items() if found), default=None)
        return None if highest is None else min(firsts[highest], key=self._sort_key)

    def admit(self, entry: QueueEntry[_L, _T], part: float = 1.0) -> None:
        """Remove a request that is admitted. Its client is charged, unless it was begun before or is in the background.

        part: of its cost, if a part of its choices begins.
        """
        self._remove(entry, self._charge(self._tenants[entry.order.tenant], entry.order, part))

    def charge(self, order: QueueOrder, part: float = 1.0) -> None:
        """Count the cost of a request as ``admit`` does. It is admitted without a wait, while no other one waits."""
        if (tenant := self._tenants.get(order.tenant)) is None:
            tenant = self._tenants[order.tenant] = _Tenant()
        tenant.virtual_time = max(tenant.virtual_time, self._time)
        self._charge(tenant, order, part)
        # without a lead over others it is like a client that never came, and keys that are not used again cost no memory
        if tenant.virtual_time <= self._time:
            del self._tenants[order.tenant]

    def discard(self, entry: QueueEntry[_L, _T]) -> None:
        """Remove a request that is not admitted. Its client is not charged."""
        self._remove(entry, 0.0)

    def move(self, entry: QueueEntry[_L, _T], lane: _L) -> None:
        """Move a request to another lane. It keeps its tag and arrival, which decide its place there."""
        self._pull(entry)
        entry.lane = lane
        self._put(entry)

    def _charge(self, tenant: _Tenant, order: QueueOrder, part: float) -> float:
        """Let a client's virtual time grow by a part of the cost of a request, and return that."""
        is_free = order.is_replay or order.priority == BACKGROUND_PRIORITY
        cost = 0.0 if is_free else order.cost * part
        if cost:
            # the time of the service is that at which the client that is served now began
            self._time = max(self._time, tenant.virtual_time)
            tenant.virtual_time += cost
            self._turn += 1
        return cost

    @property
    def _is_aged_turn(self) -> bool:
        return self._turn % AGING_PERIOD == AGING_PERIOD - 1

    def _rank_of_head(self, head: QueueEntry[_L, _T]) -> tuple[float, bool, float, float, int]:
        is_aged = self._is_aged_turn and head.order.priority > BACKGROUND_PRIORITY
        priority = float("-inf") if is_aged else -head.order.priority
        return (priority, *self._sort_key(head))

    def _sort_key(self, entry: QueueEntry[_L, _T]) -> tuple[bool, float, float, int]:
        is_fresh = not entry.order.is_replay
        _, arrival, number = entry.rank
        return is_fresh, self._virtual_time(entry) if is_fresh else _BEGUN, arrival, number

    def _virtual_time(self, entry: QueueEntry[_L, _T]) -> float:
        return self._tenants[entry.order.tenant].virtual_time

    def _put(self, entry: QueueEntry[_L, _T]) -> None:
        order = entry.order
        tenants = self._lanes.setdefault(entry.lane, {}).setdefault(order.priority, defaultdict(list))
        insort(tenants[order.tenant], entry, key=_RANK)

    def _pull(self, entry: QueueEntry[_L, _T]) -> None:
        order = entry.order
        priorities = self._lanes[entry.lane]
        tenants = priorities[order.priority]
        entries = tenants[order.tenant]
        # by bisection, since thousands may wait and any of them may be cancelled; ranks differ, as each has a number
        del entries[bisect_left(entries, entry.rank, key=_RANK)]
        if not entries:
            del tenants[order.tenant]
        if not tenants:
            del priorities[order.priority]
        if not priorities:
            del self._lanes[entry.lane]

    def _remove(self, entry: QueueEntry[_L, _T], cost: float) -> None:
        self._pull(entry)
        self.num_waiting -= 1
        tenant = self._tenants[entry.order.tenant]
        tenant.leave(entry.order, cost)
        if not tenant.families and tenant.virtual_time <= self._time:
            del self._tenants[entry.order.tenant]
