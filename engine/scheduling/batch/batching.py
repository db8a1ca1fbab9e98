"""The plan of a step: token budget, chunked prefill, preemption by recompute.

Running requests come first, and of those the decodes. If one client's answers would slow down those of others, they
take turns (``FairSteps``). A request that runs short of blocks preempts others (``Preemption``). If none was preempted,
other requests start (``Admission``).
"""

from collections.abc import Callable

from engine.options import BatchingOptions
from engine.outputs import SchedulerOutput
from engine.scheduling.batch.admission import Admission
from engine.scheduling.batch.drafts import Drafts
from engine.scheduling.batch.fair_steps import FairStep, FairSteps
from engine.scheduling.batch.preemption import Preemption
from engine.scheduling.blocks.block_pool import BlockPool
from engine.scheduling.requests.queues import BatchQueues
from engine.scheduling.requests.request import Request
from engine.scheduling.requests.status import RequestStatus
from engine.scheduling.requests.step_plan import ScheduledRequest, StepPlan
from engine.scheduling.stats import Totals


class Batcher:
    """Plans steps: moves requests between ``queues``, and takes their blocks from the pool.

    max_length: tokens that prompt and answer may have together.
    """

    def __init__(
        self,
        queues: BatchQueues,
        pool: BlockPool,
        options: BatchingOptions,
        max_length: int,
        totals: Totals,
        clock: Callable[[], float],
    ) -> None:
        self.fair_steps = FairSteps(options.max_key_slowdown, clock)
        self.admission = Admission(queues, pool, options.max_num_seqs, totals, clock)
        self.drafts = Drafts(queues, pool, self.admission, options.max_num_batched_tokens, max_length)
        self._preemption = Preemption(queues, pool)
        self._queues = queues
        self._max_num_batched_tokens = options.max_num_batched_tokens
        self._max_num_mixed_tokens = options.max_num_mixed_tokens

    def plan(self, unserved: Request | None = None) -> StepPlan:
        """Decide a step: preempt and start requests, and allocate blocks for every entry.

        unserved: a request outside the queues that waits for blocks; none that comes after it takes blocks to start.
        """
        if draft := self.drafts.take():
            return draft
        queues = self._queues
        plan = StepPlan(self._budget())
        step = self.fair_steps.begin(queues.running, queues.arrived, queues.waiting)
        self._continue_running(plan, step)
        if plan.num_preempted == 0:
            self.admission.start_requests(plan, step, unserved)
        return plan

    def draft(self, scheduled: SchedulerOutput) -> None:
        """Prepare the next step while ``scheduled`` is computed, for the case that all its requests continue alone."""
        if self.fair_steps.may_hold_all(self._queues.running):
            self.drafts.prepare(scheduled)

    def _budget(self) -> int:
        """Return the tokens of the coming step: beside answers that continue, prompts get a smaller part of it."""
        queues = self._queues
        num_answers = sum(request.is_decoding for request in queues.running) + len(queues.arrived)
        mixed = num_answers + self._max_num_mixed_tokens
        return min(self._max_num_batched_tokens, mixed) if num_answers else self._max_num_batched_tokens

    def _continue_running(self, plan: StepPlan, step: FairStep) -> None:
        """Schedule decodes before chunks of prompts, so that a long prompt does not delay running answers."""
        for request in sorted(self._queues.running, key=lambda request: not request.is_decoding):
            if request.status is RequestStatus.PREEMPTED or request.key in step.sitting_out:
                continue
            num_tokens = min(request.num_missing_tokens, plan.budget)
            if num_tokens == 0:
                return
            new_blocks = self._preemption.allocate(request, num_tokens, plan)
            if new_blocks is not None:
                plan.add(ScheduledRequest(request, num_tokens, new_blocks))
