"""The workers as a policy reads them: one frozen view of each, and for each role an order by load.

A view is replaced only when its worker has changed, so that a decision causes no work for all the other workers.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from contract.identity import Role

_FULL = 0.95
"""Used share of a KV pool from which on it gets no new request: the running ones still grow."""
UNLIMITED = 2**62

LoadOrder = tuple[int, int, float]
"""Bound tokens, requests that the worker itself reports, and the used share of its KV pool: the first one counts most."""


def is_full(kv_cache_usage: float) -> bool:
    """Return True if a KV cache takes no further request."""
    return kv_cache_usage >= _FULL


class WorkerSize(NamedTuple):
    """The properties that decide which requests a worker can take at all, whatever else it has to do now."""

    role: Role
    max_length: int
    pool_tokens: int
    has_credit: bool

    @property
    def common_length(self) -> int:
        """Tokens of prompt and answer up to which any request fits a worker of this size."""
        return min(self.max_length, self.pool_tokens) if self.has_credit else 0


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as a policy reads it.

    num_requests, num_tokens: legs of this router that are bound to it, or will be. max_requests, max_tokens: its credit, or
    this router's share of it. waits_for_credit: the credit is 0 only because other routers hold all of it, or for a moment.
    is_unsettled: it may lend and fetch KV at once.
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
    is_unsettled: bool = False
    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    max_length: int = UNLIMITED
    pool_tokens: int = UNLIMITED

    @property
    def size(self) -> WorkerSize:
        """The properties that decide which requests it can take at all."""
        has_credit = self.max_requests > 0 or self.waits_for_credit
        return WorkerSize(self.role, self.max_length, self.pool_tokens, has_credit)

    @property
    def load(self) -> LoadOrder:
        """The work that it has. Of several workers the one with the smallest load is chosen."""
        return self.num_tokens, self.num_waiting + self.num_running, round(self.kv_cache_usage, 2)


class RankedView(NamedTuple):
    """A view in the order of its role. number: makes equally loaded workers follow each other as they were attached."""

    load: LoadOrder
    number: int
    view: WorkerView
    size: WorkerSize


@dataclass
class Credits:
    """The credit of several workers together."""

    num_workers: int = 0
    max_requests: int = 0
    max_tokens: int = 0

    def add(self, view: WorkerView, sign: int) -> None:
        """Add the credit of a worker, or take it away again with -1."""
        self.num_workers += sign
        self.max_requests += sign * view.max_requests
        self.max_tokens += sign * view.max_tokens


@dataclass
class WorkerViews:
    """Owns one view for each worker. Iterates over them, oldest worker first.

    decoding: the credit of all workers that can decode. version: changes with the set of workers, or with the size of one
    of them; what a request fits stays the same until then. max_length: ``longest`` of their sizes. sizes: those of
    the workers, each once. common_length: tokens that a request may have to fit every one of them. unsettled: the ids of the
    unsettled workers.
    """

    decoding: Credits = field(default_factory=Credits)
    version: int = 0
    max_length: int | None = None
    sizes: frozenset[WorkerSize] = frozenset()
    common_length: int = 0
    unsettled: frozenset[str] = frozenset()
    _ranked: dict[str, RankedView] = field(default_factory=dict)
    _by_role: dict[Role, list[RankedView]] = field(default_factory=lambda: {role: [] for role in Role})
    _by_size: dict[WorkerSize, set[str]] = field(default_factory=dict)
    _members: dict[frozenset[WorkerSize], frozenset[str]] = field(default_factory=dict)
    _num_added: int = 0

    @classmethod
    def of(cls, views: Iterable[WorkerView]) -> "WorkerViews":
        """Return these views, oldest first."""
        made = cls()
        for view in views:
            made.put(view)
        return made

    def __len__(self) -> int:
        return len(self._ranked)

    def __iter__(self) -> Iterator[WorkerView]:
        return (ranked.view for ranked in self._ranked.values())

    def get(self, worker_id: str) -> RankedView | None:
        """Return the view of a worker; None if there is none."""
        return self._ranked.get(worker_id)

    def put(self, view: WorkerView) -> None:
        """Add a worker, or replace its view. It keeps its place among equally loaded ones."""
        size = view.size
        if former := self._ranked.get(view.worker_id):
            self._remove(former)
            number = former.number
        else:
            self._num_added += 1
            number = self._num_added
        if former is None or former.size != size:
            self._resize(view.worker_id, size, former)
        ranked = RankedView(view.load, number, view, size)
        self._ranked[view.worker_id] = ranked
        # no two numbers are equal, so the views behind them are never compared
        insort(self._by_role[view.role], ranked)
        if view.role is not Role.PREFILL:
            self.decoding.add(view, 1)
        if view.is_unsettled is not (view.worker_id in self.unsettled):
            self.unsettled ^= {view.worker_id}

    def remove(self, worker_id: str) -> None:
        """Remove a worker, if it is here."""
        if former := self._ranked.pop(worker_id, None):
            self._remove(former)
            self._resize(worker_id, None, former)
            self.unsettled -= {worker_id}

    def ranked(self, role: Role) -> Sequence[RankedView]:
        """Return the workers of a role, least loaded first."""
        return self._by_role[role]

    def of_size(self, size: WorkerSize) -> Set[str]:
        """Return the ids of the workers of a size."""
        return self._by_size[size]

    def members(self, sizes: frozenset[WorkerSize]) -> frozenset[str]:
        """Return the ids of the workers of several sizes; the same object until ``version`` changes."""
        if (found := self._members.get(sizes)) is None:
            found = self._members[sizes] = frozenset().union(*(self._by_size[size] for size in sizes))
        return found

    def check_integrity(self) -> None:
        """Check that every order and count is that of the views. Raises AssertionError."""
        fresh = WorkerViews.of(self)
        for role in Role:
            assert [each.view for each in self.ranked(role)] == [each.view for each in fresh.ranked(role)]
        assert all(self.of_size(size) == fresh.of_size(size) for size in self.sizes)
        assert self.decoding == fresh.decoding
        assert self.sizes == fresh.sizes == self._by_size.keys()
        assert (self.max_length, self.common_length) == (fresh.max_length, fresh.common_length)
        assert self.unsettled == {view.worker_id for view in self if view.is_unsettled}
        for sizes, members in self._members.items():
            assert members == {each.view.worker_id for each in self._ranked.values() if each.size in sizes}

    def _remove(self, former: RankedView) -> None:
        of_role = self._by_role[former.view.role]
        del of_role[bisect_left(of_role, former)]
        if former.view.role is not Role.PREFILL:
            self.decoding.add(former.view, -1)

    def _resize(self, worker_id: str, size: WorkerSize | None, former: RankedView | None) -> None:
        """Move a worker to another size, or count one that is new or removed."""
        self.version += 1
        # the sets of members are made again when they are asked for, which is once for each lane
        self._members.clear()
        if former:
            same = self._by_size[former.size]
            same.discard(worker_id)
            if not same:
                del self._by_size[former.size]
        if size:
            self._by_size.setdefault(size, set()).add(worker_id)
        self.sizes = frozenset(self._by_size)
        self.max_length = longest(self.sizes)
        self.common_length = min((size.common_length for size in self.sizes), default=0)


def longest(sizes: Iterable[WorkerSize]) -> int | None:
    """Return how many tokens prompt and answer may have together on the largest worker or pair; None without any."""
    most: dict[Role, int] = {}
    for size in sizes:
        most[size.role] = max(most.get(size.role, 0), size.max_length)
    pair = [most[role] for role in (Role.PREFILL, Role.DECODE) if role in most]
    options = [*([min(pair)] if pair else []), *([most[Role.AGGREGATED]] if Role.AGGREGATED in most else [])]
    return max(options, default=None)
