"""The wait for blocks that a tier has: a tier is a peer whose KV is fetched.

A queued request whose next blocks are in a tier reserves the blocks of all its known tokens in one step (law 4), as one does
that receives KV of another worker, and waits in the same status. It runs when the copies are over, with what was intact; the
rest is computed. So a load never fails a request.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import count, groupby

from engine.kv_tiers.storage import BlockCopy
from engine.scheduling.blocks.block_pool import BlockPool, blocks_needed
from engine.scheduling.requests.finish import RequestStatus
from engine.scheduling.requests.request import Request
from engine.scheduling.tiers.kv_tiers import KVTiers
from engine.scheduling.tiers.tier import Tier
from engine.scheduling.waits.waits import Ready


@dataclass(frozen=True)
class _Part:
    """The part of a load that comes from one tier."""

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

    num_cached: blocks before them, which the pool had. holder: of the blocks in quarantine. ends: numbers the ends of parts.
    """

    request: Request
    num_cached: int
    holder: str
    parts: list[_Part] = field(default_factory=list)
    is_abandoned: bool = False
    ends: Iterator[int] = field(default_factory=partial(count, 1))

    @property
    def is_over(self) -> bool:
        """True when no copy will be made any more."""
        return all(part.future.done() for part in self.parts)

    def num_intact(self) -> int:
        """Return how many blocks have arrived, from the first on."""
        total = 0
        for part in self.parts:
            total += part.num_intact
            if part.num_intact < len(part.copies):
                break
        return total


class TierLoads:
    """Fulfils ``WaitStage``. Owns the requests that wait for blocks of a tier; ``Admission`` lets them enter.

    timeout_seconds: how long a request may wait; then its tokens are computed. wake: wakes the step loop, from any thread.
    """

    name = "KV tier"
    status = RequestStatus.WAITING_FOR_REMOTE_KVS

    def __init__(
        self, tiers: KVTiers, pool: BlockPool, timeout_seconds: float, wake: Callable[[], None]
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self.tiers = tiers
        self._pool = pool
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

    def begin(self, request: Request, num_promised: Callable[[], int]) -> bool:
        """Reserve blocks for a queued request, and copy to them what a tier has of it; see ``Waits.enter``.

        num_promised: returns how many free blocks are promised to others. Returns False, and reserves nothing, if no tier
        has its next block, or too few blocks are free.
        """
        pool = self._pool
        hashes = request.reusable_hashes
        cached = pool.find_cached(hashes)
        num_cached = len(cached)
        found = self.tiers.find(hashes[num_cached:])
        num_new = blocks_needed(request.num_tokens, pool.block_size) - num_cached
        if not pool.can_allocate(num_new + (num_promised() if found else 0), cached):
            return False
        self.tiers.offer(cached, hashes[:num_cached])  # what is used in the pool stays in the tiers
        if not found:
            return False
        blocks = pool.allocate(request.key, num_new, cached)
        load = self._loads[request.key] = _Load(request, num_cached, f"load:{next(self._numbers)}")
        next_block = iter(blocks[num_cached:])
        for tier, run in groupby(found, key=lambda one: one[0]):
            copies = [
                BlockCopy(next(next_block), tier.slots.prepare_load(block_hash), block_hash)
                for _, block_hash in run
            ]
            load.parts.append(_Part(tier, copies, tier.storage.load(copies)))
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
            elif self._pool.is_quarantined(load.holder):
                self._pool.release_quarantine(load.holder)
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
        hashes = request.block_hashes
        num_indexed = load.num_cached + load.num_intact()
        arrived = hashes[load.num_cached : num_indexed]
        # What came from a slow tier is stored in the faster ones: it will be used again.
        self.tiers.offer(self._pool.enter(request.key, load.num_cached, arrived), arrived)
        request.num_indexed_blocks = num_indexed
        request.num_computed_tokens = num_indexed * self._pool.block_size
        if not request.is_known_to_runner:  # what the caches held of it is reported to its client once
            request.num_cached_tokens = request.num_computed_tokens

    def _abandon(self, load: _Load) -> None:
        key = load.request.key
        load.is_abandoned = True
        for part in load.parts:
            part.tier.num_stuck += 1
            part.future.cancel()  # one that has begun goes on
        if load.is_over:
            self._pool.free(key)
        else:
            self._pool.hand_over(key, load.holder)
            self._pool.quarantine(load.holder, load.num_cached)
