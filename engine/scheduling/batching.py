"""Which requests compute how many tokens in a step: token budget, chunked prefill, preemption by recompute.

Running requests come first, and of those the decodes. Where one client's answers would slow down those of others, they
take turns (``FairSteps``). Then others start, in the order of the ``PriorityQueue`` (priority, then arrival): requests whose
KV has arrived from another worker, preempted ones, new ones. Blocks are allocated on demand, except for a prefill leg: it
gets those of its whole prompt at once or does not start, and is never preempted, because another worker reads them (law 4).
A request that runs short of blocks takes them from the last one in the same order, itself included: so the first of all
always advances, and two requests cannot preempt each other in turns.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

from engine.outputs import ModelRunnerOutput, SchedulerOutput
from engine.scheduling.block_pool import BlockPool, blocks_needed
from engine.scheduling.ending import RequestStatus
from engine.scheduling.fair_steps import FairStep, FairSteps
from engine.scheduling.priority_queue import PriorityQueue, comes_first
from engine.scheduling.request import Request, ending_tokens
from engine.scheduling.step_plan import ScheduledRequest, StepPlan
from engine.settings import EngineSettings


@dataclass(frozen=True)
class _Draft:
    """The next step, if these requests go on and no other joins them.

    short: entries that need one more block each. enders: tokens that might end one of the answers; None: any might.
    """

    requests: list[Request]
    plan: StepPlan
    short: list[ScheduledRequest]
    enders: frozenset[int] | None


class Batcher:
    """Owns the queues of the requests that could run, and takes their blocks from the pool.

    waiting: need blocks (new ones and preempted ones). arrived: their prompt's KV is in their blocks already.
    """

    def __init__(
        self,
        pool: BlockPool,
        settings: EngineSettings,
        max_length: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.waiting = PriorityQueue()
        self.arrived = PriorityQueue()
        self.running = PriorityQueue()
        self._pool = pool
        self._max_num_seqs = settings.max_num_seqs
        self._max_num_batched_tokens = settings.max_num_batched_tokens
        self._max_num_mixed_tokens = settings.max_num_mixed_tokens
        self._max_length = max_length
        self._draft: _Draft | None = None
        self.fair_steps = FairSteps(settings.max_key_slowdown, clock)

    def plan(self, unserved: Request | None = None) -> StepPlan:
        """Decide a step: requests start and are preempted, and blocks for every entry are allocated.

        unserved: a request outside that waits for blocks; none that is queued behind it takes any to start.
        """
        plan = self._take_draft()
        if plan is None:
            plan = StepPlan(self._budget())
            step = self.fair_steps.begin(self.running, self.arrived, self.waiting)
            self._continue_running(plan, step)
            if plan.num_preempted == 0:
                self._start_others(plan, step, unserved)
        return plan

    def draft(self, scheduled: SchedulerOutput) -> None:
        """Prepare the next step while this one is computed, for the case that all its requests go on and none joins them.

        Changes nothing that is visible outside.
        """
        requests = list(self.running)
        size = self._pool.block_size
        counts = scheduled.num_scheduled_tokens
        all_draw = all(request.num_missing_tokens == counts.get(request.key) for request in requests)
        if not requests or not all_draw or len(requests) > self._max_num_batched_tokens:
            return
        if not self.fair_steps.may_hold_all(self.running):
            return
        plan = StepPlan.drafted(requests, self._max_num_batched_tokens)
        held = self._pool.num_blocks_of
        short = [one for one in plan if one.request.num_tokens >= held(one.request.key) * size]
        enders = {ending_tokens(request, self._max_length) for request in requests}
        known = None if None in enders else frozenset[int]().union(*filter(None, enders))
        self._draft = _Draft(requests, plan, short, known)

    def go_on(self, output: ModelRunnerOutput) -> StepPlan | None:
        """Return the draft if every request goes on with what this step has sampled, before that is processed; else None.

        At None no request has changed; otherwise blocks for every entry are allocated.
        """
        enders = self._draft.enders if self._draft else None
        drawn = output.sampled_token_ids
        if enders is None or not all(drawn) or not enders.isdisjoint(chain.from_iterable(drawn)):
            return None
        return self._take_draft()

    def drop_draft(self) -> None:
        """Drop the draft: the step that it was to follow was interrupted."""
        self._draft = None

    @property
    def has_room(self) -> bool:
        """Return whether another request could run."""
        return len(self.running) < self._max_num_seqs

    def seconds_to_pause(self) -> float:
        """Return how long the next step is delayed, as ``FairSteps.seconds_to_pause`` says."""
        return self.fair_steps.seconds_to_pause(self.running, self.arrived, self.waiting)

    def _take_draft(self) -> StepPlan | None:
        """Return the draft, with its blocks, if it is still valid, else None. The draft is gone either way."""
        draft = self._draft
        self._draft = None
        if draft is None or draft.requests != list(self.running):
            return None
        could_start = len(self.running) < self._max_num_seqs and (self.waiting or self.arrived)
        if could_start or not self._pool.can_allocate(len(draft.short)):
            return None
        for entry in draft.short:
            entry.new_block_ids.extend(self._pool.allocate(entry.request.key, 1))
        return draft.plan

    @property
    def num_promised_blocks(self) -> int:
        """Blocks that running requests still lack for their known tokens: they started because these were free."""
        return sum(map(self._num_lacking_blocks, self.running))

    def remove(self, request: Request) -> None:
        """Remove a request that has ended from the queue that it is in, if any."""
        _ = self.running.remove(request) or self.waiting.remove(request) or self.arrived.remove(request)

    def index_computed(self, request: Request) -> None:
        """Let other requests find the full blocks that are computed from now on (law 1)."""
        num_full = request.num_computed_tokens // self._pool.block_size
        if num_full > request.num_indexed_blocks:
            start = request.num_indexed_blocks
            self._pool.enter(request.key, start, request.block_hashes[start:num_full])
            request.num_indexed_blocks = num_full

    def _budget(self) -> int:
        """Return the tokens of the coming step: beside answers that go on, prompts get a smaller part of it."""
        num_answers = sum(request.is_decoding for request in self.running) + len(self.arrived)
        mixed = num_answers + self._max_num_mixed_tokens
        return min(self._max_num_batched_tokens, mixed) if num_answers else self._max_num_batched_tokens

    def _num_lacking_blocks(self, request: Request) -> int:
        num_needed = blocks_needed(request.num_tokens, self._pool.block_size)
        return num_needed - self._pool.num_blocks_of(request.key)

    def _continue_running(self, plan: StepPlan, step: FairStep) -> None:
        """Schedule decodes before chunks of prompts, so that a long prompt does not delay running answers."""
        for request in sorted(self.running, key=lambda request: not request.is_decoding):
            if request.status is RequestStatus.PREEMPTED or request.key in step.sitting_out:
                continue
            num_tokens = min(request.num_missing_tokens, plan.budget)
            if num_tokens == 0:
                return
            new_blocks = self._make_room(request, num_tokens, plan)
            if new_blocks is not None:
                plan.add(ScheduledRequest(request, num_tokens, new_blocks))

    def _make_room(self, request: Request, num_tokens: int, plan: StepPlan) -> list[int] | None:
        """Allocate blocks for these tokens, preempting requests behind it if needed; None if it is the last itself."""
        num_needed = blocks_needed(request.num_computed_tokens + num_tokens, self._pool.block_size)
        num_new = max(0, num_needed - self._pool.num_blocks_of(request.key))
        while not self._pool.can_allocate(num_new):
            victim = max(self._victims(), key=lambda each: each.precedence)
            self._preempt(victim, plan)
            if victim is request:
                return None
        return self._pool.allocate(request.key, num_new)

    def _victims(self) -> Iterator[Request]:
        """Return the requests that hold blocks and may lose them: those that lend theirs may not."""
        return (request for request in chain(self.running, self.arrived) if not request.is_sending)

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        plan.drop(request)
        self.remove(request)
        self._pool.free(request.key)
        request.lose_blocks()
        self.waiting.add(request)

    def _start_others(self, plan: StepPlan, step: FairStep, unserved: Request | None) -> None:
        """Start requests as far as budget, ``max_num_seqs`` and blocks reach.

        The first one that lacks blocks holds up all that need some, or small requests would pass a large one for ever. While
        one outside lacks them, only the first in the queue may pass it, so that one of these two can always go on.
        Requests that have arrived go on regardless: they hold their blocks already, and must run to give them back.
        """
        has_blocks = True
        while plan.budget > 0 and len(self.running) < self._max_num_seqs:
            arrived = step.next_of(self.arrived)
            waiting = (self.waiting.first if unserved else step.next_of(self.waiting)) if has_blocks else None
            if arrived and comes_first(arrived, waiting):
                self._start(arrived, self.arrived)
                plan.add(ScheduledRequest(arrived, 1, self._pool.table_of(arrived.key)))
                step.started(arrived, 0)
                continue
            if waiting is None:
                return
            entry = self._try_to_start(waiting, plan.budget) if comes_first(waiting, unserved) else None
            has_blocks = entry is not None
            if entry is not None:
                plan.add(entry)
                step.started(waiting, entry.num_tokens)
                self._start(waiting, self.waiting)

    def _try_to_start(self, request: Request, budget: int) -> ScheduledRequest | None:
        """Return an entry with its blocks, cached ones included; None unless blocks for all known tokens are free now.

        Only this chunk's blocks are taken (of a prefill leg: all). If the rest were not checked, a request could start, run
        short and be preempted again for ever, while leases hold the blocks that it needs. No other request starts before
        its last chunk, which takes the whole budget, and what it still lacks is promised to it: that is not reserved either.
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
        return ScheduledRequest(
            request, num_tokens, self._pool.allocate(request.key, num_new, cached), is_resumed
        )

    def _start(self, request: Request, queue: PriorityQueue) -> None:
        request.status = RequestStatus.RUNNING
        queue.remove(request)
        self.running.add(request)
