"""Which requests compute how many tokens in a step: token budget, chunked prefill, preemption by recompute.

Running requests come first, and of those the decodes; then requests whose KV has arrived from another worker; then new
ones, by priority and in order of arrival. Blocks are handed out on demand (A14), except for a prefill leg: it gets those
of its whole prompt at once or does not start, and is never preempted, because another worker reads them (law 4).
"""

from collections import deque

from engine.scheduling.block_pool import BlockPool, blocks_needed
from engine.scheduling.ending import RequestStatus
from engine.scheduling.request import Request
from engine.scheduling.step_plan import StepPlan, Turn


class Batcher:
    """Owns the order of the requests that could run, and takes their blocks from the pool.

    waiting: need blocks. arrived: their prompt's KV is in their blocks already. running: in order of admission.
    """

    def __init__(self, pool: BlockPool, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.waiting: deque[Request] = deque()
        self.arrived: deque[Request] = deque()
        self.running: list[Request] = []
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens

    def plan(self) -> StepPlan:
        """Decide a step. Requests start and are preempted by this; blocks for every turn are allocated."""
        plan = StepPlan(self._max_num_batched_tokens)
        self._continue_running(plan)
        if plan.num_preempted == 0:
            self._promote_arrived(plan)
            self._admit_waiting(plan)
        return plan

    def enqueue(self, request: Request) -> None:
        """A new request waits behind preempted ones, and behind those of its own or of a higher priority (B10)."""
        place = len(self.waiting)
        while place and self._gives_way(self.waiting[place - 1], request):
            place -= 1
        self.waiting.insert(place, request)

    @property
    def has_preempted(self) -> bool:
        """A preempted request waits for blocks (at the head of the line): those that become free are for it."""
        return bool(self.waiting) and self.waiting[0].status is RequestStatus.PREEMPTED

    def remove(self, request: Request) -> None:
        """The request ended; it may stand anywhere, or nowhere."""
        for queue in (self.running, self.waiting, self.arrived):
            if request in queue:
                queue.remove(request)

    def _gives_way(self, other: Request, request: Request) -> bool:
        return other.status is RequestStatus.WAITING and other.priority < request.priority

    def _continue_running(self, plan: StepPlan) -> None:
        """Decodes before chunks of prompts, so that a long prompt does not hold up running answers (A32)."""
        for request in sorted(self.running, key=lambda request: not request.is_decoding):
            if request.status is RequestStatus.PREEMPTED:
                continue
            num_tokens = min(request.num_missing_tokens, plan.budget)
            if num_tokens == 0:
                return
            new_blocks = self._make_room(request, num_tokens, plan)
            if new_blocks is not None:
                plan.add(Turn(request, num_tokens, new_blocks))

    def _make_room(self, request: Request, num_tokens: int, plan: StepPlan) -> list[int] | None:
        """New blocks for these tokens, if need be at the cost of younger requests; None when it is the youngest."""
        num_needed = blocks_needed(request.num_computed_tokens + num_tokens, self._pool.block_size)
        num_new = max(0, num_needed - self._pool.num_blocks_of(request.key))
        while not self._pool.can_allocate(num_new):
            youngest = next(r for r in reversed(self.running) if not r.is_sending)
            self._preempt(youngest, plan)
            if youngest is request:
                return None
        return self._pool.allocate(request.key, num_new)

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        plan.drop(request)
        self.running.remove(request)
        self._pool.free(request.key)
        request.lose_blocks()
        self.waiting.appendleft(request)

    def _has_place(self, plan: StepPlan) -> bool:
        return plan.budget > 0 and len(self.running) < self._max_num_seqs

    def _promote_arrived(self, plan: StepPlan) -> None:
        while self.arrived and self._has_place(plan):
            request = self.arrived.popleft()
            self._start(request)
            plan.add(Turn(request, 1, self._pool.table_of(request.key)))

    def _admit_waiting(self, plan: StepPlan) -> None:
        """As far as budget, ``max_num_seqs`` and blocks reach (A27); the first that does not fit holds the line."""
        while self.waiting and self._has_place(plan):
            turn = self._try_first_turn(self.waiting[0], plan.budget)
            if turn is None:
                return
            plan.add(turn)
            self._start(self.waiting.popleft())

    def _try_first_turn(self, request: Request, budget: int) -> Turn | None:
        """A turn with the blocks for it, cached ones included; None unless all known tokens fit now.

        Taken are only this chunk's blocks (a prefill leg: all). Without asking for the rest, a request could start, run
        short and be preempted again for ever, while leases hold the blocks that it needs.
        """
        size = self._pool.block_size
        cached = self._pool.find_cached(request.reusable_hashes())
        num_missing_blocks = blocks_needed(request.num_tokens, size) - len(cached)
        if not self._pool.can_allocate(num_missing_blocks, cached):
            return None
        num_cached = len(cached) * size
        num_tokens = min(request.num_tokens - num_cached, budget)
        num_chunk_blocks = blocks_needed(num_cached + num_tokens, size) - len(cached)
        num_new = num_missing_blocks if request.is_sending else num_chunk_blocks
        is_resumed = request.status is RequestStatus.PREEMPTED
        request.find_computed(len(cached), is_first=not is_resumed)
        return Turn(request, num_tokens, self._pool.allocate(request.key, num_new, cached), is_resumed)

    def _start(self, request: Request) -> None:
        request.status = RequestStatus.RUNNING
        self.running.append(request)
