"""The plan of a step: token budget, policy, preemption by recompute; and the plan of the one after it.

The policy decides whether prompts and answers share the step (``SchedulingPolicy``). Running requests come first, and of
those the decodes. If one client's answers would slow down those of others, they take turns (``FairSteps``). A request that
runs short of blocks preempts others (``Preemption``). If none was preempted, other requests start (``Admission``). While the
model computes, ``NextStep`` prepares the next step, for the case that all requests continue by one token each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

from engine.options import BatchingOptions
from engine.outputs import ModelRunnerOutput, SchedulerOutput
from engine.scheduling.batch.admission import Admission, Preemption
from engine.scheduling.batch.drafting import Drafting
from engine.scheduling.batch.fair_steps import FairStep, FairSteps
from engine.scheduling.batch.policy import POLICIES, Stage
from engine.scheduling.blocks.cache_pools import CachePools
from engine.scheduling.requests.finish import RequestStatus
from engine.scheduling.requests.queues import BatchQueues, PriorityQueue
from engine.scheduling.requests.request import Request
from engine.scheduling.requests.step_plan import ScheduledRequest, StepPlan
from engine.scheduling.requests.stopping import add_bitmask, ends_with_next_token, stop_tokens
from engine.scheduling.stats import Totals
from engine.scheduling.tiers.loads import TierLoads
from engine.scheduling.waits.waits import Waits


@dataclass(frozen=True)
class _Prepared:
    """The next step, valid if these requests continue and no other joins them.

    short: entries that need one more block each. stop_tokens: tokens that might end an answer; None: any might.
    """

    requests: list[Request]
    plan: StepPlan
    short: list[ScheduledRequest]
    stop_tokens: set[int] | None


class NextStep:
    """Owns the plan of the next step, if there is one."""

    def __init__(
        self, queues: BatchQueues, pools: CachePools, admission: Admission, budget: int, max_length: int
    ) -> None:
        self._queues = queues
        self._pools = pools
        self._admission = admission
        self._budget = budget
        self._max_length = max_length
        self._prepared: _Prepared | None = None
        self._without_masks: StepPlan | None = None

    def prepare(self, scheduled: SchedulerOutput) -> None:
        """Prepare the step after ``scheduled``, if each running request samples a token in that. Allocates nothing yet.

        Not if drafts are requested for that step, or in this one: how it continues is known with the results only.
        """
        if scheduled.num_draft_tokens or scheduled.scheduled_spec_decode_tokens:
            return
        requests = list(self._queues.running.requests)
        if not requests or len(requests) > self._budget:
            return
        snapshots = self._pools.snapshots
        known: set[int] | None = set()
        for request in requests:
            # Each must sample a token: what one does next that is in the middle of its prompt depends on that step's budget.
            if request.num_missing_tokens != scheduled.num_scheduled_tokens.get(request.key):
                return
            # A state is saved when this step has ended, and before the next one starts.
            if snapshots and snapshots.is_due(request.num_tokens, request.num_prompt_tokens):
                return
            if known is not None and (own := stop_tokens(request, self._max_length)) is not None:
                known |= own
            else:
                known = None
        plan = StepPlan.of_next_step(requests, self._budget, self._pools.num_tables)
        self._prepared = _Prepared(requests, plan, self._short_of(plan), known)

    def pop(self) -> StepPlan | None:
        """Return the plan, with blocks allocated, if it is still valid, else None. It is dropped either way."""
        prepared = self._prepared
        self._prepared = None
        if prepared is None or prepared.requests != list(self._queues.running.requests):
            return None
        return self._with_blocks(prepared.plan, prepared.short)

    def plan_ahead(self) -> StepPlan | None:
        """Return a plan of the step after the one that is being computed, before its tokens are known; blocks are allocated.

        It has the requests of the prepared step but those that the coming token ends by their length. One that this token
        turns out to end otherwise is computed once more, and its result is dropped. None if there is no plan, or a request
        samples anything else than one token that it continues with; then the plan is kept. ``add_masks`` must follow.
        """
        prepared = self._prepared
        # A prefill leg ends with its token, an embedding samples none, and the choices of a prompt separate behind it.
        if prepared is None or any(
            one.is_sending or one.is_pooling or one.engine_request.num_choices > 1
            for one in prepared.requests
        ):
            return None
        requests = [one for one in prepared.requests if not ends_with_next_token(one, self._max_length)]
        if not requests:
            return None
        is_whole = len(requests) == len(prepared.requests)
        without_blocks = prepared.plan
        if not is_whole:
            without_blocks = StepPlan.of_next_step(requests, self._budget, self._pools.num_tables)
        # A request that turns out to have ended gives its blocks back while the device still writes to them. That is safe:
        # who gets a block writes to it, or reads it, in a later pass, and passes of one device run one after another.
        short = prepared.short if is_whole else self._short_of(without_blocks)
        plan = self._with_blocks(without_blocks, short)
        if plan is not None:
            self._prepared = None
            self._without_masks = plan
        return plan

    def add_masks(self) -> None:
        """Add what grammars allow to the order of ``plan_ahead``, if there is one: the tokens before it are known now."""
        plan = self._without_masks
        self._without_masks = None
        if plan is not None and plan.next_output is not None:
            add_bitmask(plan, plan.next_output)

    def pop_if_all_continue(self, output: ModelRunnerOutput) -> StepPlan | None:
        """Return the plan if no token that was sampled in ``output``, which is not processed yet, can end an answer.

        If None is returned, no request has changed.
        """
        known = self._prepared.stop_tokens if self._prepared else None
        sampled = output.sampled_token_ids
        if known is None or not all(sampled) or not known.isdisjoint(chain.from_iterable(sampled)):
            return None
        return self.pop()

    def drop(self) -> None:
        """Drop the plan."""
        self._prepared = None

    def _short_of(self, plan: StepPlan) -> list[ScheduledRequest]:
        """Return the entries that need one more block each."""
        size = self._pools.block_size
        pool = self._pools.first
        short = []
        for entry in plan.entries.values():
            if len(entry.request.token_ids) >= pool.num_blocks_of(entry.request.key) * size:
                short.append(entry)  # noqa: PERF401 see StepPlan.of_next_step
        return short

    def _with_blocks(self, plan: StepPlan, short: list[ScheduledRequest]) -> StepPlan | None:
        """Allocate a block for each of these entries; None if another request could start, or blocks run short."""
        is_awaited = self._queues.waiting.requests or self._queues.arrived.requests
        if is_awaited and self._admission.has_room:
            return None
        if short and not self._pools.can_allocate(len(short)):
            return None
        for entry in short:
            entry.add_blocks(self._pools.allocate(entry.request.key, 1))
        return plan


class Batcher:
    """Plans steps: moves requests between ``queues``, and takes their blocks from the pool.

    max_length: tokens that prompt and answer may have together. waits, loads: see ``Admission``. drafting: None unless the
    engine speculates.
    """

    def __init__(
        self,
        queues: BatchQueues,
        pools: CachePools,
        options: BatchingOptions,
        max_length: int,
        totals: Totals,
        clock: Callable[[], float],
        waits: Waits,
        loads: TierLoads | None,
    ) -> None:
        self.fair_steps = FairSteps(options.max_key_slowdown, clock)
        self.admission = Admission(queues, pools, options.max_num_seqs, totals, clock, waits, loads)
        self.next_step = NextStep(queues, pools, self.admission, options.max_num_batched_tokens, max_length)
        self.policy = POLICIES[options.scheduling_policy](options, queues, clock)
        self.drafting: Drafting | None = None
        if options.speculate != "none":  # otherwise nothing of it runs in a step
            self.drafting = Drafting(queues, pools, self.fair_steps, options, max_length, totals)
        self.preemption = Preemption(queues, pools, loads.tiers if loads else None)
        self._queues = queues
        self._pools = pools
        self._stage: Stage | None = None

    def plan(self, unserved: Request | None = None) -> StepPlan:
        """Decide a step: preempt and start requests, and allocate blocks for every entry.

        unserved: a request outside the queues that waits for blocks; none that comes after it takes blocks to start.
        """
        self._stage = None
        if plan := self.next_step.pop():
            return plan
        plan = StepPlan(self.policy.budget())
        for stage in self.policy.stages():
            self._fill(plan, stage, unserved)
            if plan.entries:
                self._stage = stage
                break
        if self.drafting is not None:
            self.drafting.add_drafts(plan)
        return plan

    def note(self, scheduled: SchedulerOutput, seconds: float) -> None:
        """Record how long a step took."""
        self.fair_steps.note(scheduled, seconds)
        if self.drafting is not None:
            self.drafting.note(scheduled, seconds)
        if self._stage is Stage.PREFILL:
            self.policy.last_prompt_latency = seconds
        self._stage = None

    def _fill(self, plan: StepPlan, stage: Stage, unserved: Request | None) -> None:
        """Add what a step of this stage computes."""
        step = self._begin(stage)
        # Decodes before chunks of prompts, so that a long prompt does not delay running answers.
        for request in sorted(self._queues.running.requests, key=lambda request: not request.is_decoding):
            # The list is a copy: a request of it may have been preempted for one before it.
            if request.status is RequestStatus.PREEMPTED or request.key in step.sitting_out:
                continue
            if not stage.holds(request):
                continue
            num_tokens = min(request.num_missing_tokens, plan.budget)
            if num_tokens == 0:
                break
            if self._pools.snapshots is not None and stage is not Stage.PREFILL:
                computed = request.num_computed_tokens
                num_tokens = self._pools.snapshots.cut(computed, num_tokens, request.num_prompt_tokens)
            new_blocks = self.preemption.allocate(request, num_tokens, plan)
            if new_blocks is not None:
                plan.add(ScheduledRequest(request, num_tokens, new_blocks))
        # Blocks ran short: one that started now might lose them again in the next step.
        if plan.num_preempted == 0:
            self.admission.start_requests(plan, step, unserved, stage)

    def _begin(self, stage: Stage) -> FairStep:
        queues = self._queues
        if stage is Stage.PREFILL:  # no answer is in it, so none of them may lose its turn
            return self.fair_steps.begin(PriorityQueue(), queues.running, queues.arrived, queues.waiting)
        return self.fair_steps.begin(queues.running, queues.arrived, queues.waiting)
