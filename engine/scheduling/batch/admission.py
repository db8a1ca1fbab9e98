"""The start of requests in a step: of those that have a place in the batch, tokens in the budget, and blocks.

They start in the order of their precedence (priority, then arrival), whether they are new, were preempted, or have KV that
arrived from another worker. Blocks are allocated on demand, except for a prefill leg: it gets those of its whole prompt at
once or does not start, because it is never preempted (law 4).
"""

from collections.abc import Callable

from engine.scheduling.batch.fair_steps import FairStep
from engine.scheduling.blocks.block_pool import BlockPool, blocks_needed
from engine.scheduling.requests.priority_queue import PriorityQueue, comes_first
from engine.scheduling.requests.queues import BatchQueues
from engine.scheduling.requests.request import Request
from engine.scheduling.requests.status import RequestStatus
from engine.scheduling.requests.step_plan import ScheduledRequest, StepPlan
from engine.scheduling.stats import Totals


class Admission:
    """Starts requests that are queued, allocates their first blocks, and counts what the cache held of them."""

    def __init__(
        self,
        queues: BatchQueues,
        pool: BlockPool,
        max_num_seqs: int,
        totals: Totals,
        clock: Callable[[], float],
    ) -> None:
        self._queues = queues
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._totals = totals
        self._clock = clock

    @property
    def has_room(self) -> bool:
        """True while another request could run."""
        return len(self._queues.running) < self._max_num_seqs

    def start_requests(self, plan: StepPlan, step: FairStep, unserved: Request | None) -> None:
        """Start requests as far as the budget, ``max_num_seqs`` and the blocks reach.

        The first one that lacks blocks holds up all that need some: otherwise small requests would pass a large one for
        ever. While ``unserved``, outside the queues, lacks blocks, only the first waiting request may pass it, so that one
        of these two can always start. Requests that have arrived start regardless: they hold their blocks already, and must
        run to free them.
        """
        queues = self._queues
        has_blocks = True
        while plan.budget > 0 and self.has_room:
            arrived = step.next_of(queues.arrived)
            waiting = (
                (queues.waiting.first if unserved else step.next_of(queues.waiting)) if has_blocks else None
            )
            if arrived and comes_first(arrived, waiting):
                self._start(arrived, queues.arrived)
                plan.add(ScheduledRequest(arrived, 1, self._pool.table_of(arrived.key)))
                step.started(arrived, 0)
                continue
            if waiting is None:
                return
            entry = self._allocate(waiting, plan.budget) if comes_first(waiting, unserved) else None
            has_blocks = entry is not None
            if entry is not None:
                self._start(waiting, queues.waiting)
                plan.add(entry)
                step.started(waiting, entry.num_tokens)

    def _start(self, request: Request, queue: PriorityQueue) -> None:
        self._queues.start(request, queue)
        if request.is_known_to_runner:  # it was preempted, and has been counted
            return
        request.milestones.scheduled = self._clock()
        if not request.is_fork:
            self._totals.prefix_cache.record(request.num_prompt_tokens, request.num_cached_tokens)
            self._totals.num_cached_tokens += request.num_cached_tokens

    def _allocate(self, request: Request, budget: int) -> ScheduledRequest | None:
        """Return an entry with its blocks, cached ones included; None unless blocks for all known tokens are free now.

        Only the blocks of this chunk are allocated (for a prefill leg: all). If the rest were not checked, a request could
        start, run short and be preempted again for ever, while leases hold the blocks that it needs. No other request
        starts before its last chunk, which takes the whole budget, and what it still lacks is promised to it
        (``BatchQueues.num_promised_blocks``), so remote KV does not take it either.
        """
        size = self._pool.block_size
        cached = self._pool.find_cached(request.reusable_hashes)
        num_missing_blocks = blocks_needed(request.num_tokens, size) - len(cached)
        if not self._pool.can_allocate(num_missing_blocks, cached):
            return None
        num_cached = len(cached) * size
        num_tokens = min(request.num_tokens - num_cached, budget)
        num_chunk_blocks = blocks_needed(num_cached + num_tokens, size) - len(cached)
        num_new = num_missing_blocks if request.is_sending else num_chunk_blocks
        is_resumed = request.status is RequestStatus.PREEMPTED
        request.find_computed(len(cached), is_first=not is_resumed)
        blocks = self._pool.allocate(request.key, num_new, cached)
        return ScheduledRequest(request, num_tokens, blocks, is_resumed)
