"""The next step, prepared while the model computes the current one."""

from dataclasses import dataclass
from itertools import chain

from engine.outputs import ModelRunnerOutput, SchedulerOutput
from engine.scheduling.batch.admission import Admission
from engine.scheduling.blocks.block_pool import BlockPool
from engine.scheduling.requests.grammar_matching import add_bitmask
from engine.scheduling.requests.queues import BatchQueues
from engine.scheduling.requests.request import Request
from engine.scheduling.requests.step_plan import ScheduledRequest, StepPlan
from engine.scheduling.requests.stopping import ends_with_next_token, stop_tokens


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
        self._without_masks: StepPlan | None = None

    def prepare(self, scheduled: SchedulerOutput) -> None:
        """Prepare the step after ``scheduled``, if each running request samples a token in that. Allocates nothing yet."""
        requests = list(self._queues.running)
        if not requests or len(requests) > self._budget:
            return
        counts = scheduled.num_scheduled_tokens
        if [request.num_missing_tokens for request in requests] != [counts.get(one.key) for one in requests]:
            return
        plan = StepPlan.drafted(requests, self._budget)
        by_request = {stop_tokens(request, self._max_length) for request in requests}
        known = None if None in by_request else frozenset[int]().union(*filter(None, by_request))
        self._draft = _Draft(requests, plan, self._short_of(plan), known)

    def take(self) -> StepPlan | None:
        """Return the draft, with blocks allocated, if it is still valid, else None. It is dropped either way."""
        draft = self._draft
        self._draft = None
        if draft is None or draft.requests != list(self._queues.running):
            return None
        return self._with_blocks(draft.plan, draft.short)

    def take_ahead(self) -> StepPlan | None:
        """Return a plan of the step after the one that is being computed, before its tokens are known; blocks are allocated.

        It has the requests of the draft but those that the coming token ends by their length. One that this token turns out
        to end otherwise is computed once more, and that result is discarded. Its blocks may be taken meanwhile, but only
        for passes that come later. None if there is no draft, or a request samples anything else than one token that it
        continues with; then the draft is kept. ``add_masks`` must follow.
        """
        draft = self._draft
        if draft is None or not all(map(_samples_one, draft.requests)):
            return None
        requests = [one for one in draft.requests if not ends_with_next_token(one, self._max_length)]
        if not requests:
            return None
        is_whole = len(requests) == len(draft.requests)
        drafted = draft.plan if is_whole else StepPlan.drafted(requests, self._budget)
        plan = self._with_blocks(drafted, draft.short if is_whole else self._short_of(drafted))
        if plan is not None:
            self._draft = None
            self._without_masks = plan
        return plan

    def add_masks(self) -> None:
        """Add what grammars allow to the order of ``take_ahead``, if there is one: the tokens before it are known now."""
        plan = self._without_masks
        self._without_masks = None
        if plan is not None and plan.drafted_order is not None:
            add_bitmask(plan, plan.drafted_order)

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

    def _short_of(self, plan: StepPlan) -> list[ScheduledRequest]:
        """Return the entries that need one more block each."""
        size = self._pool.block_size
        held = self._pool.num_blocks_of
        return [entry for entry in plan if len(entry.request.token_ids) >= held(entry.request.key) * size]

    def _with_blocks(self, plan: StepPlan, short: list[ScheduledRequest]) -> StepPlan | None:
        """Allocate a block for each of these entries; None if another request could start, or blocks run short."""
        could_start = self._admission.has_room and (self._queues.waiting or self._queues.arrived)
        if could_start or not self._pool.can_allocate(len(short)):
            return None
        for entry in short:
            entry.new_block_ids.extend(self._pool.allocate(entry.request.key, 1))
        return plan


def _samples_one(request: Request) -> bool:
    """Return whether the token that a request samples next, if it is not its last one, is the only one that it needs."""
    return not request.is_sending and not request.is_pooling and request.asked.num_choices == 1
