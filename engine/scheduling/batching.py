"""Which requests compute how many tokens in a step: token budget, chunked prefill, preemption by recompute.

Running requests come first, and of those the decodes, among which one client's take turns where they would slow down
other clients' (``FairSteps``). Then others start, in the order of the ``Line`` (priority, then arrival): requests whose KV
has arrived from another worker, preempted ones, new ones. Blocks are handed out on demand, except for a prefill leg:
it gets those of its whole prompt at once or does not start, and is never preempted, because another worker reads them (law
4). Who runs short of blocks takes them from the last in the same order, itself included: so the first of all always
advances, and two requests cannot preempt each other in turns.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

from engine.outputs import ModelRunnerOutput, SchedulerOutput
from engine.scheduling.block_pool import BlockPool, blocks_needed
from engine.scheduling.ending import RequestStatus
from engine.scheduling.fair_steps import FairStep, FairSteps
from engine.scheduling.line import Line, comes_first
from engine.scheduling.request import Request, ending_tokens
from engine.scheduling.step_plan import StepPlan, Turn
from engine.settings import EngineSettings


@dataclass(frozen=True)
class _Draft:
    """What would be the next step for these requests.

    short: those turns that need one more block each. enders: tokens that might end one of the answers; None: any might.
    """

    requests: list[Request]
    plan: StepPlan
    short: list[Turn]
    enders: frozenset[int] | None


class Batcher:
    """Owns the lines of the requests that could run, and takes their blocks from the pool.

    waiting: need blocks (new ones and preempted ones). arrived: their prompt's KV is in their blocks already.
    """

    def __init__(
        self,
        pool: BlockPool,
        settings: EngineSettings,
        max_length: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.waiting = Line()
        self.arrived = Line()
        self.running = Line()
        self._pool = pool
        self._max_num_seqs = settings.max_num_seqs
        self._max_num_batched_tokens = settings.max_num_batched_tokens
        self._max_num_mixed_tokens = settings.max_num_mixed_tokens
        self._max_length = max_length
        self._draft: _Draft | None = None
        self.fair_steps = FairSteps(settings.max_key_slowdown, clock)

    def plan(self, unserved: Request | None = None) -> StepPlan:
        """Decide a step. Requests start and are preempted by this; blocks for every turn are allocated.

        unserved: a request outside that waits for blocks; nobody behind it in line takes any to start.
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
        """While a step is computed: prepare the next one, for the case that all its requests go on and nobody joins them.

        Changes nothing that anybody sees.
        """
        requests, size = list(self.running), self._pool.block_size
        counts = scheduled.num_scheduled_tokens
        all_draw = all(request.num_missing_tokens == counts.get(request.key) for request in requests)
        if not requests or not all_draw or len(requests) > self._max_num_batched_tokens:
            return
        if not self.fair_steps.may_hold_all(self.running):
            return
        plan = StepPlan.drafted(requests, self._max_num_batched_tokens)
        held = self._pool.num_blocks_of
        short = [turn for turn in plan if turn.request.num_tokens >= held(turn.request.key) * size]
        enders = {ending_tokens(request, self._max_length) for request in requests}
        known = None if None in enders else frozenset[int]().union(*filter(None, enders))
        self._draft = _Draft(requests, plan, short, known)

    def go_on(self, output: ModelRunnerOutput) -> StepPlan | None:
        """The draft, where every request goes on with what this step has drawn, before it is taken in; else None.

        Then no request has changed; otherwise blocks for every turn are allocated.
        """
        enders, drawn = self._draft.enders if self._draft else None, output.sampled_token_ids
        if enders is None or not all(drawn) or not enders.isdisjoint(chain.from_iterable(drawn)):
            return None
        return self._take_draft()

    def drop_draft(self) -> None:
        """The step was cut short: what was to follow it does not."""
        self._draft = None

    @property
    def has_room(self) -> bool:
        """Another request could run."""
        return len(self.running) < self._max_num_seqs

    def seconds_to_pause(self) -> float:
        """Return how long the next step is delayed, as ``FairSteps.seconds_to_pause`` says."""
        return self.fair_steps.seconds_to_pause(self.running, self.arrived, self.waiting)

    def _take_draft(self) -> StepPlan | None:
        """The step as drafted, with its blocks; None where it is not that which is due. Either way the draft is gone."""
        draft, self._draft = self._draft, None
        if draft is None or draft.requests != list(self.running):
            return None
        could_start = len(self.running) < self._max_num_seqs and (self.waiting or self.arrived)
        if could_start or not self._pool.can_allocate(len(draft.short)):
            return None
        for turn in draft.short:
            turn.new_block_ids.extend(self._pool.allocate(turn.request.key, 1))
        return draft.plan

    @property
    def num_promised_blocks(self) -> int:
        """Blocks that running requests still lack for what they know: they started because these were free."""
        return sum(map(self._num_lacking_blocks, self.running))

    def remove(self, request: Request) -> None:
        """The request ended; it may stand in any line, or in none."""
        _ = self.running.remove(request) or self.waiting.remove(request) or self.arrived.remove(request)

    def index_computed(self, request: Request) -> None:
        """Full blocks that are computed may be found by others from now on (law 1)."""
        num_full = request.num_computed_tokens // self._pool.block_size
        if num_full > request.num_indexed_blocks:
            start = request.num_indexed_blocks
            self._pool.enter(request.key, start, request.block_hashes[start:num_full])
            request.num_indexed_blocks = num_full

    def _budget(self) -> int:
        """Tokens of the coming step: where answers go on in it, prompts get a smaller part of it than they could."""
        num_answers = sum(request.is_decoding for request in self.running) + len(self.arrived)
        mixed = num_answers + self._max_num_mixed_tokens
        return min(self._max_num_batched_tokens, mixed) if num_answers else self._max_num_batched_tokens

    def _num_lacking_blocks(self, request: Request) -> int:
        num_needed = blocks_needed(request.num_tokens, self._pool.block_size)
        return num_needed - self._pool.num_blocks_of(request.key)

    def _continue_running(self, plan: StepPlan, step: FairStep) -> None:
        """Decodes before chunks of prompts, so that a long prompt does not hold up running answers."""
        for request in sorted(self.running, key=lambda request: not request.is_decoding):
            if request.status is RequestStatus.PREEMPTED or request.key in step.sitting_out:
                continue
            num_tokens = min(request.num_missing_tokens, plan.budget)
            if num_tokens == 0:
                return
            new_blocks = self._make_room(request, num_tokens, plan)
            if new_blocks is not None:
                plan.add(Turn(request, num_tokens, new_blocks))

    def _make_room(self, request: Request, num_tokens: int, plan: StepPlan) -> list[int] | None:
        """New blocks for these tokens, if need be at the cost of those behind it; None when it is the last itself."""
        num_needed = blocks_needed(request.num_computed_tokens + num_tokens, self._pool.block_size)
        num_new = max(0, num_needed - self._pool.num_blocks_of(request.key))
        while not self._pool.can_allocate(num_new):
            victim = max(self._victims(), key=lambda each: each.precedence)
            self._preempt(victim, plan)
            if victim is request:
                return None
        return self._pool.allocate(request.key, num_new)

    def _victims(self) -> Iterator[Request]:
        """Who holds blocks and may lose them: not those that lend theirs."""
        return (request for request in chain(self.running, self.arrived) if not request.is_sending)

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        plan.drop(request)
        self.remove(request)
        self._pool.free(request.key)
        request.lose_blocks()
        self.waiting.add(request)

    def _start_others(self, plan: StepPlan, step: FairStep, unserved: Request | None) -> None:
        """As far as budget, ``max_num_seqs`` and blocks reach.

        The first that lacks blocks holds up all that need some, or a big one would be passed by small ones for ever. While
        one outside lacks them the first in line is the only one that may pass it: so one of these two can always go on.
        Requests that have arrived go on without it: they hold their blocks already, and must run to give them back.
        """
        has_blocks = True
        while plan.budget > 0 and len(self.running) < self._max_num_seqs:
            arrived = step.next_of(self.arrived)
            waiting = (self.waiting.first if unserved else step.next_of(self.waiting)) if has_blocks else None
            if arrived and comes_first(arrived, waiting):
                self._start(arrived, self.arrived)
                plan.add(Turn(arrived, 1, self._pool.table_of(arrived.key)))
                step.started(arrived, 0)
                continue
            if waiting is None:
                return
            turn = self._try_first_turn(waiting, plan.budget) if comes_first(waiting, unserved) else None
            has_blocks = turn is not None
            if turn is not None:
                plan.add(turn)
                step.started(waiting, turn.num_tokens)
                self._start(waiting, self.waiting)

    def _try_first_turn(self, request: Request, budget: int) -> Turn | None:
        """A turn with the blocks for it, cached ones included; None unless all known tokens fit now.

        Taken are only this chunk's blocks (a prefill leg: all). Without asking for the rest, a request could start, run
        short and be preempted again for ever, while leases hold the blocks that it needs. Nobody starts before its last
        chunk (it takes the whole budget), and what it still lacks is promised to it: nobody reserves that either.
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

    def _start(self, request: Request, line: Line) -> None:
        request.status = RequestStatus.RUNNING
        line.remove(request)
        self.running.add(request)
