"""The allocation of blocks in a step: to requests that start, and to running ones, for which others are preempted.

Requests start in the order of their precedence (priority, then arrival), whether they are new, were preempted, or have KV
that arrived from another worker or from a tier. Blocks are allocated on demand, except for a prefill leg: it gets those of
its whole prompt at once or does not start, because it is never preempted: another worker reads its blocks (law 4). With a
window that is a promise of as many as it will hold at once.

A request is preempted when a running one needs a block for its next tokens and none is free. The last one in precedence
loses its blocks and is queued again, to be recomputed behind the blocks that the cache or a KV tier has; it may be the
request that needs the block. So the first of all always advances, and two requests cannot preempt each other in turns.
Requests that wait cause no preemption: they start if blocks are free.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

from engine.scheduling.batch.fair_steps import FairStep
from engine.scheduling.batch.policy import Stage
from engine.scheduling.blocks.block_pool import BlockPool, blocks_needed
from engine.scheduling.blocks.cache_pools import Blocks, CachePools
from engine.scheduling.blocks.lent_blocks import allocate_to_lend, grow_lent
from engine.scheduling.requests.finish import RequestStatus
from engine.scheduling.requests.queues import BatchQueues, PriorityQueue, comes_first
from engine.scheduling.requests.request import Request
from engine.scheduling.requests.step_plan import ScheduledRequest, StepPlan
from engine.scheduling.stats import Totals
from engine.scheduling.tiers.kv_tiers import KVTiers
from engine.scheduling.tiers.loads import TierLoads
from engine.scheduling.waits.waits import Waits


class Admission:
    """Starts requests that are queued, allocates their first blocks, and counts what the cache held of them.

    loads: the wait stage of requests whose blocks are in a KV tier, one of ``waits``; None without tiers.
    """

    def __init__(
        self,
        queues: BatchQueues,
        pools: CachePools,
        max_num_seqs: int,
        totals: Totals,
        clock: Callable[[], float],
        waits: Waits,
        loads: TierLoads | None,
    ) -> None:
        self._waits = waits
        self._loads = loads
        self._queues = queues
        self._pools = pools
        self._max_num_seqs = max_num_seqs
        self._totals = totals
        self._clock = clock

    @property
    def num_places(self) -> int:
        """The number of further requests that could run: those that load their blocks have their places."""
        num_loading = len(self._loads.waiting) if self._loads else 0
        return self._max_num_seqs - len(self._queues.running.requests) - num_loading

    @property
    def has_room(self) -> bool:
        """True while another request could run."""
        return self.num_places > 0

    def start_requests(
        self, plan: StepPlan, step: FairStep, unserved: Request | None, stage: Stage = Stage.MIXED
    ) -> None:
        """Start requests of this stage as far as the budget, ``max_num_seqs`` and the blocks reach.

        While ``unserved``, outside the queues, lacks blocks, only the first waiting request may pass it.
        """
        queues = self._queues
        promised = partial(queues.promised_blocks, self._pools.first)
        has_blocks = stage is not Stage.DECODE
        while plan.budget > 0 and self.has_room:
            arrived = step.next_of(queues.arrived, stage)
            # The first of all, not the fairest: so either it or ``unserved`` can always start.
            waiting = (
                (queues.waiting.first if unserved else step.next_of(queues.waiting, stage))
                if has_blocks
                else None
            )
            # One that has arrived needs no more blocks to start, and must run to free those that it holds.
            if arrived and comes_first(arrived, waiting):
                # One, unless a tier had only a part of what is known.
                num_tokens = min(arrived.num_missing_tokens, plan.budget)
                if num_tokens < arrived.num_missing_tokens and stage is Stage.PREFILL and plan.entries:
                    return
                self._start(arrived, queues.arrived)
                blocks = self._pools.tables_of(arrived.key)
                plan.add(ScheduledRequest(arrived, num_tokens, blocks, arrived.is_known_to_runner))
                step.on_start(arrived, num_tokens - 1)
                continue
            if waiting is None or not self._has_place(waiting, stage):
                return
            may_start = comes_first(waiting, unserved)
            if may_start and self._loads and self._loads.begin(waiting, promised):
                queues.waiting.remove(waiting)
                self._waits.enter(waiting, self._loads)
                continue
            entry = self._allocate(waiting, plan, stage) if may_start else None
            # One that lacks blocks holds up all that need some: else small requests would pass a large one for ever.
            has_blocks = entry is not None
            if entry is not None:
                self._start(waiting, queues.waiting)
                plan.add(entry)
                step.on_start(waiting, entry.num_tokens)

    def _has_place(self, waiting: Request, stage: Stage) -> bool:
        """Return whether a place is left beside those kept for requests before it that hold blocks, and start later."""
        before = (one for one in self._queues.arrived.requests if comes_first(one, waiting))
        num_kept = sum(not stage.holds(one) for one in before)
        return self.num_places > num_kept

    def _start(self, request: Request, queue: PriorityQueue) -> None:
        self._queues.start(request, queue)
        if request.is_known_to_runner:  # it was preempted, and has been counted
            return
        request.milestones.scheduled = self._clock()
        if not request.is_fork:
            self._totals.prefix_cache.record(request.num_prompt_tokens, request.num_cached_tokens)
            self._totals.num_cached_tokens += request.num_cached_tokens

    def _allocate(self, request: Request, plan: StepPlan, stage: Stage) -> ScheduledRequest | None:
        """Return an entry with its blocks, cached ones included; None unless blocks for all known tokens are free now.

        Only the blocks of this chunk are allocated (for a prefill leg: all). In a step of whole prompts, None also if they
        do not all fit beside those that are scheduled.
        """
        size = self._pools.block_size
        cached = self._pools.find_cached(request.reusable_hashes)
        num_cached_blocks = len(cached[0])
        num_missing_blocks = blocks_needed(request.num_tokens, size) - num_cached_blocks
        # Unless the rest were checked too, a request could start, run short and be preempted again for ever, while leases
        # hold the blocks that it needs. The rest stays free meanwhile: no other request starts before its last chunk,
        # which takes the whole budget, and remote KV leaves what it still lacks (``BatchQueues.num_promised_blocks``).
        if not self._pools.can_hold(num_missing_blocks, cached):
            return None
        num_cached = num_cached_blocks * size
        num_tokens = min(request.num_tokens - num_cached, plan.budget)
        if stage is Stage.PREFILL and plan.entries and num_tokens < request.num_tokens - num_cached:
            return None
        if self._pools.snapshots is not None and stage is not Stage.PREFILL:
            num_tokens = self._pools.snapshots.cut(num_cached, num_tokens, request.num_prompt_tokens)
        num_chunk_blocks = blocks_needed(num_cached + num_tokens, size) - num_cached_blocks
        num_new = num_missing_blocks if request.is_sending else num_chunk_blocks
        is_resumed = request.status is RequestStatus.PREEMPTED
        request.num_computed_tokens = num_cached
        request.num_indexed_blocks = num_cached_blocks
        if not is_resumed:  # what the cache held of it is reported to its client once
            request.num_cached_tokens = num_cached
        if request.is_sending and self._pools.has_windows:
            blocks = allocate_to_lend(self._pools, request.key, num_new, num_chunk_blocks, cached)
        else:
            blocks = self._pools.allocate(request.key, num_new, cached)
        return ScheduledRequest(request, num_tokens, blocks, is_resumed)


class Preemption:
    """Allocates the blocks of running requests, and preempts requests where blocks run short.

    tiers: the KV tiers, to which what a preempted request has computed is copied before its blocks are free; or None.
    """

    def __init__(self, queues: BatchQueues, pools: CachePools, tiers: KVTiers | None) -> None:
        self._queues = queues
        self._pools = pools
        self._tiers = tiers

    def allocate(self, request: Request, num_tokens: int, plan: StepPlan) -> Blocks | None:
        """Allocate the blocks that a running request lacks for its next ``num_tokens``.

        Preempts other requests as needed. Returns None if the request was preempted itself.
        """
        num_needed = blocks_needed(request.num_computed_tokens + num_tokens, self._pools.block_size)
        if request.is_sending and self._pools.has_windows:
            return grow_lent(self._pools, request.key, num_needed)
        num_new = max(0, num_needed - self._pools.first.num_blocks_of(request.key))
        while not self._pools.can_allocate(num_new):
            victim = self._victims()[0]
            if self._tiers is not None:
                # Usually they are stored already, since the tiers store first what ``next_tables`` yields first.
                self._tiers.store_now(victim)
                if self._pools.can_allocate(num_new):  # the missing blocks were held for copies
                    break
            plan.drop(victim)
            self._queues.remove(victim)
            self._pools.free(victim.key)
            victim.lose_blocks()
            self._queues.waiting.add(victim)
            if victim is request:
                return None
        return self._pools.allocate(request.key, num_new)

    def next_tables(self, pool: BlockPool) -> Iterator[list[int]]:
        """Yield the blocks in a pool of each request that may be preempted, the next one first."""
        for victim in self._victims():
            yield pool.table_of(victim.key)

    def _victims(self) -> list[Request]:
        """Return the requests that may be preempted: the last in precedence first, so that the first of all advances."""
        holders = chain(self._queues.running.requests, self._queues.arrived.requests)
        # One that lends its blocks keeps them (law 4).
        candidates = (one for one in holders if not one.is_sending)
        return sorted(candidates, key=lambda one: one.precedence, reverse=True)
