"""The wait for blocks that a tier has: a tier is a peer whose KV is fetched.

A queued request whose next blocks are in a tier reserves the blocks of all its known tokens in one step (law 4), as one does
that receives KV of another worker, and waits in the same status. It runs when the copies are over, with what was intact; the
rest is computed. So a load never fails a request.

Of a group of layers with a window only the blocks that the next token sees are loaded. They are of no use behind a damaged
block: the request is queued again then, and finds what has arrived in the pools.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import count, groupby

from engine.kv_tiers.storage import BlockCopy
from engine.scheduling.blocks.block_pool import blocks_needed
from engine.scheduling.blocks.cache_pools import CachePools
from engine.scheduling.blocks.lent_blocks import (
    allocate_each,
    can_allocate_each,
    hand_over,
    release_quarantine,
)
from engine.scheduling.requests.finish import RequestStatus
from engine.scheduling.requests.request import Request
from engine.scheduling.tiers.kv_tiers import KVTiers
from engine.scheduling.tiers.load_plans import plan_prefix, plan_swapped
from engine.scheduling.tiers.tier import Tier
from engine.scheduling.waits.waits import Ready


@dataclass(frozen=True)
class _Part:
    """The part of a load that comes from one tier, for one group of layers. first: the place of its first block."""

    group: int
    first: int
    tier: Tier
    copies: Sequence[BlockCopy]
    future: Future[int]

    @property
    def num_intact(self) -> int:
        """Blocks, from the first on, that are in the pool; 0 if the copy was cancelled."""
        return 0 if self.future.cancelled() else self.future.result()

    def end(self) -> None:
        """Give the slots back."""
        self.tier.complete_load(self.copies, self.num_intact, is_over=not self.future.cancelled())


@dataclass(eq=False)
class _Load:
    """The blocks that a request waits for, or has waited for (is_abandoned).

    num_tokens: of the prefix that it has when all is loaded. num_cached: of each group, places before those that are loaded.
    holder: of the blocks in quarantine. ends: numbers the ends of parts.
    """

    request: Request
    num_tokens: int
    num_cached: Sequence[int]
    holder: str
    parts: list[_Part] = field(default_factory=list)
    is_abandoned: bool = False
    ends: Iterator[int] = field(default_factory=partial(count, 1))

    @property
    def is_over(self) -> bool:
        """True when no copy will be made any more."""
        return all(part.future.done() for part in self.parts)

    def num_intact(self) -> int:
        """Return how many blocks of one group are there: those before the first damaged one."""
        total = self.num_cached[0]
        for part in self.parts:
            total += part.num_intact
            if part.num_intact < len(part.copies):
                break
        return total

    @property
    def is_whole(self) -> bool:
        """True if all blocks have arrived."""
        return all(part.num_intact == len(part.copies) for part in self.parts)


class TierLoads:
    """Fulfils ``WaitStage``. Owns the requests that wait for blocks of a tier; ``Admission`` lets them enter.

    timeout_seconds: how long a request may wait; then its tokens are computed. wake: wakes the step loop, from any thread.
    """

    name = "KV tier"
    status = RequestStatus.WAITING_FOR_REMOTE_KVS

    def __init__(
        self, tiers: KVTiers, pools: CachePools, timeout_seconds: float, wake: Callable[[], None]
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self.tiers = tiers
        self._pools = pools
        self._wake = wake
        self._loads: dict[str, _Load] = {}
        self.waiting: Collection[str] = self._loads.keys()
        self._overdue: list[Request] = []
        self._ended: deque[_Load] = deque()
        self._numbers = count()

    @property
    def has_pending(self) -> bool:
        """True while ``pop_ready`` would return something, or end a load that was abandoned."""
        return bool(self._ended or self._overdue)

    def needs_wait(self, request: Request) -> bool:
        """Return False: a request enters this stage when it could start, with the blocks that it needs then."""
        return False

    def start(self, request: Request) -> None:
        """Do nothing; see ``needs_wait``."""

    def begin(self, request: Request, promised: Callable[[], Sequence[int]]) -> bool:
        """Reserve blocks for a queued request, and copy to them what a tier has of it; see ``Waits.enter``.

        promised: returns how many blocks each of some requests lacks. Returns False, and reserves nothing, if no tier has
        its next block, or too few blocks are free.
        """
        pools = self._pools
        known = request.reusable_hashes
        cached = pools.find_cached(known)
        plan = (
            plan_swapped(pools, self.tiers, request)
            if pools.states
            else plan_prefix(pools, self.tiers, known, cached)
        )
        num_all = blocks_needed(request.num_tokens, pools.block_size)
        heads = plan.heads if plan else cached[: len(pools.pools)]
        numbers = [num_all - len(head) for head in heads]
        if not can_allocate_each(pools, numbers, heads, promised() if plan else ()):
            return False
        self.tiers.offer(cached, known[: len(cached[0])])  # what is used in the pool stays in the tiers
        if plan is None:
            return False
        tables = allocate_each(pools, request.key, numbers, heads)
        holder = f"load:{next(self._numbers)}"
        load = self._loads[request.key] = _Load(request, plan.num_tokens, list(map(len, heads)), holder)
        hashes = plan.hashes
        for group, (head, tiers) in enumerate(zip(heads, plan.sources, strict=True)):
            table = tables[group]
            first = len(head)
            for tier, run in groupby(tiers):
                end = first + len(list(run))
                copies = [
                    BlockCopy(table[place], tier.slots.prepare_load(hashes[place]), hashes[place])
                    for place in range(first, end)
                ]
                load.parts.append(_Part(group, first, tier, copies, tier.storage.load(copies)))
                first = end
        if self.tiers.states is not None and plan.swapped is not None:
            tier = plan.swapped
            copies = self.tiers.states.copies_from(tier, hashes[-1], request.key, plan.num_tokens)
            load.parts.append(_Part(len(heads), 0, tier, copies, tier.storage.load(copies)))
        for part in load.parts:  # when all are known: one may be over at once
            part.future.add_done_callback(lambda _: self._on_copied(load))
        return True

    def pop_ready(self) -> list[Ready]:
        """Return the requests whose blocks are there, as far as they were intact, and those that have waited too long."""
        ready = [Ready(request) for request in self._overdue]
        self._overdue = []
        while self._ended:
            load = self._ended.popleft()
            for part in load.parts:
                part.tier.num_stuck -= load.is_abandoned
                part.end()
            if not load.is_abandoned:
                self._receive(load)
                ready.append(Ready(load.request))
            else:
                release_quarantine(self._pools, load.holder)
        return ready

    def give_up(self, request: Request) -> bool:
        """End the wait of a request: free what it reserved, or quarantine it if a copy to it cannot be stopped."""
        if request in self._overdue:
            self._overdue.remove(request)
            return False
        self._abandon(self._loads.pop(request.key))
        return True

    def overdue(self, request: Request, seconds: float) -> None:
        """Let the request's tokens be computed: it does not finish. The copy may still write to its blocks."""
        self._abandon(self._loads.pop(request.key))
        self._overdue.append(request)

    def check_integrity(self, requests: Mapping[str, Request]) -> None:
        """Assert that those who wait are live, and that the tiers' records are right."""
        for key, load in self._loads.items():
            assert requests[key] is load.request and load.request.status is self.status
        self.tiers.check_integrity()

    def _on_copied(self, load: _Load) -> None:
        """Record the end of a part of a load; in the thread that copied, or that cancelled it."""
        # By number: of two that end at the same time, both would see that all are over.
        if next(load.ends) == len(load.parts):
            self._ended.append(load)
            self._wake()

    def _receive(self, load: _Load) -> None:
        """Let the blocks be found that have arrived, all of which were verified (law 1)."""
        request = load.request
        del self._loads[request.key]
        pools = self._pools
        size = pools.block_size
        is_all_needed = pools.has_windows or pools.states is not None
        for part in load.parts:
            if part.group == len(pools.pools):
                continue  # states
            end = min(
                part.first + part.num_intact, load.num_tokens // size
            )  # no partly filled block is found
            own = request.block_hashes[part.first : end]
            pools.pools[part.group].enter(request.key, part.first, own)
            if part.num_intact < len(part.copies) and not is_all_needed:
                break  # what is behind will be computed, into these blocks
        if is_all_needed and not load.is_whole:
            pools.free(request.key)  # its windows begin behind what must be computed, and so do its states
            return
        request.num_computed_tokens = load.num_tokens if load.is_whole else load.num_intact() * size
        request.num_indexed_blocks = request.num_computed_tokens // size
        # What came from a slow tier is stored in the faster ones: it will be used again.
        first = min(load.num_cached)
        hashes = request.block_hashes[first : request.num_indexed_blocks]
        self.tiers.offer(pools.enter(request.key, first, hashes), hashes)
        if not request.is_known_to_runner:  # what the caches held of it is reported to its client once
            request.num_cached_tokens = request.num_computed_tokens

    def _abandon(self, load: _Load) -> None:
        key = load.request.key
        load.is_abandoned = True
        for part in load.parts:
            part.tier.num_stuck += 1
            part.future.cancel()  # one that has begun goes on
        if load.is_over:
            self._pools.free(key)
            return
        hand_over(self._pools, key, load.holder)
        for pool, num_cached in zip(self._pools.pools, load.num_cached, strict=True):
            pool.quarantine(load.holder, num_cached)
