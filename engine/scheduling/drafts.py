"""The next step, prepared while the model computes the current one."""

from dataclasses import dataclass
from itertools import chain

from engine.outputs import ModelRunnerOutput, SchedulerOutput
from engine.scheduling.admission import Admission
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.queues import BatchQueues
from engine.scheduling.request import Request
from engine.scheduling.step_plan import ScheduledRequest, StepPlan
from engine.scheduling.stopping import stop_tokens


@dataclass(frozen=True)
class _Draft:
    """The next step, valid if these requests continue and no other joins them.

    short: entries that need one more block each. stop_tokens: tokens that might end an answer; None: any might.
    """

    requests: list[Request]
    plan: StepPlan
    short: list[ScheduledRequest]
    stop_tokens: frozenset[int] | None


class Drafts:
    """Owns the draft of the next step, if there is one."""

    def __init__(
        self, queues: BatchQueues, pool: BlockPool, admission: Admission, budget: int, max_length: int
    ) -> None:
        self._queues = queues
        self._pool = pool
        self._admission = admission
        self._budget = budget
        self._max_length = max_length
        self._draft: _Draft | None = None

    def prepare(self, scheduled: SchedulerOutput) -> None:
        """Prepare the step after ``scheduled``, if each running request samples a token in that. Allocates nothing yet."""
        requests = list(self._queues.running)
        if not requests or len(requests) > self._budget:
            return
        counts = scheduled.num_scheduled_tokens
        if [request.num_missing_tokens for request in requests] != [counts.get(one.key) for one in requests]:
            return
        size = self._pool.block_size
        held = self._pool.num_blocks_of
        plan = StepPlan.drafted(requests, self._budget)
        short = [entry for entry in plan if len(entry.request.token_ids) >= held(entry.request.key) * size]
        by_request = {stop_tokens(request, self._max_length) for request in requests}
        known = None if None in by_request else frozenset[int]().union(*filter(None, by_request))
        self._draft = _Draft(requests, plan, short, known)

    def take(self) -> StepPlan | None:
        """Return the draft, with blocks allocated, if it is still valid, else None. It is dropped either way."""
        draft = self._draft
        self._draft = None
        if draft is None or draft.requests != list(self._queues.running):
            return None
        could_start = self._admission.has_room and (self._queues.waiting or self._queues.arrived)
        if could_start or not self._pool.can_allocate(len(draft.short)):
            return None
        for entry in draft.short:
            entry.new_block_ids.extend(self._pool.allocate(entry.request.key, 1))
        return draft.plan

    def take_if_all_continue(self, output: ModelRunnerOutput) -> StepPlan | None:
        """Return the draft if no token that was sampled in ``output``, which is not processed yet, can end an answer.

        If None is returned, no request has changed.
        """
        known = self._draft.stop_tokens if self._draft else None
        sampled = output.sampled_token_ids
        if known is None or not all(sampled) or not known.isdisjoint(chain.from_iterable(sampled)):
            return None
        return self.take()

    def drop(self) -> None:
        """Drop the draft."""
        self._draft = None
