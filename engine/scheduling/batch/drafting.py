"""Drafts in the steps that continue answers: for which requests, how many, and when they are worth their time.

A draft is a guess of a coming token. A step computes the drafts of a request behind its newest token, and samples a token in
the place of each: exactly the one that a step without drafts would sample. So the first drafts that are equal save a step
each, and the KV of the others is overwritten by the next step. One step, seen from here:

1. ``request_drafts`` sets the number of drafts that the runner proposes behind the tokens of the step that starts.
2. The runner's proposals come with the step's results; the request keeps them (``Drafts``).
3. ``add_drafts`` adds them to the next step, if that continues answers only. They never preempt a request, and never go
   beyond the end that an answer has by its length, its stop tokens or its grammar.

A step with drafts takes longer. How much longer is measured (``StepCost``), and so is the share of its drafts that each
request accepts. A draft is requested while it makes clearly more tokens a second of the whole batch: a batch of one request,
which waits for weights, takes many, a large one, which waits for arithmetic, only those that are nearly certain.

A request whose drafts are worth nothing in this batch is in doubt, and costs nothing: no drafts are computed, and its steps
begin early, or ahead, as without speculation. Now and then the runner compares what it would have proposed some tokens ago
with the tokens that were sampled since. That shows as much as computed drafts do.
"""

from collections.abc import Sequence

from engine.options import BatchingOptions
from engine.outputs import ModelRunnerOutput, SchedulerOutput
from engine.scheduling.batch.fair_steps import FairSteps
from engine.scheduling.blocks.block_pool import blocks_needed
from engine.scheduling.blocks.cache_pools import CachePools
from engine.scheduling.requests.queues import BatchQueues
from engine.scheduling.requests.request import Request
from engine.scheduling.requests.step_plan import ScheduledRequest, StepPlan
from engine.scheduling.stats import Totals

# Weight of the newest step.
_WEIGHT = 0.02
# Where all steps had about equal numbers of tokens, a further token is taken to cost this part of an average one. It is
# little, so that drafts are tried from time to time.
_UNKNOWN_COST = 0.1
# The standard deviation of numbers of tokens, as a part of their mean, from which on the steps show what a token costs.
_LEAST_SPREAD = 0.02
# A single step that takes longer than this many times what was expected was disturbed.
_DISTURBED = 3.0
# A draft is computed if it gives this many times the tokens that its time would give otherwise: shares of right drafts, and
# lengths of steps, are estimates.
_LEAST_WORTH = 1.2
# What the share of right drafts of a request is taken to be at most before it had any.
_UNTESTED = 0.7
# Requests for drafts in a row for which nothing was found, after which a request is in doubt.
_MISSES = 4
# Tokens of an answer between two comparisons.
_COMPARE_EVERY = 16


class StepCost:
    """Estimates how long a step of answers takes by its number of tokens: a line through the latest steps."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._tokens = 0.0
        self._seconds = 0.0
        self._variance = 0.0
        self._covariance = 0.0

    def note(self, num_tokens: int, seconds: float) -> None:
        """Record a step."""
        self._num_steps += 1
        weight = max(_WEIGHT, 1 / self._num_steps)
        if self._num_steps > 1:
            seconds = min(seconds, _DISTURBED * self.seconds(num_tokens))
        more_tokens = num_tokens - self._tokens
        more_seconds = seconds - self._seconds
        self._tokens += weight * more_tokens
        self._seconds += weight * more_seconds
        self._variance = (1 - weight) * (self._variance + weight * more_tokens**2)
        self._covariance = (1 - weight) * (self._covariance + weight * more_tokens * more_seconds)

    def seconds(self, num_tokens: int) -> float:
        """Return the expected length of a step; 1 before the first one was recorded."""
        if not self._num_steps:
            return 1.0
        average = self._seconds / self._tokens
        unknown = (_LEAST_SPREAD * self._tokens) ** 2
        slope = (self._covariance + unknown * _UNKNOWN_COST * average) / (self._variance + unknown)
        # Between nothing and an equal share for each token: a step's fixed cost is not negative.
        return self._seconds + min(max(slope, 0.0), average) * (num_tokens - self._tokens)


class Drafting:
    """Adds drafts to steps, and learns from them.

    max_length: tokens that prompt and answer may have together.
    """

    def __init__(
        self,
        queues: BatchQueues,
        pools: CachePools,
        fair_steps: FairSteps,
        options: BatchingOptions,
        max_length: int,
        totals: Totals,
    ) -> None:
        self.cost = StepCost()
        self._queues = queues
        self._pools = pools
        self._fair_steps = fair_steps
        self._most = options.num_speculative_tokens
        # With states, each of a step has a spare slot.
        self._most_requests = options.max_num_seqs if pools.states is None else pools.states.num_spares
        self._max_tokens = options.max_num_decode_tokens
        self._max_length = max_length
        self._totals = totals
        self._num_last = 0
        totals.spec_decoding.num_spec_tokens = self._most

    def note(self, scheduled: SchedulerOutput, seconds: float) -> None:
        """Record how long a step took."""
        if scheduled.is_decode_only and scheduled.total_num_scheduled_tokens:
            self._num_last = scheduled.total_num_scheduled_tokens
            if seconds > 0:
                self.cost.note(self._num_last, seconds)

    def add_drafts(self, plan: StepPlan) -> None:
        """Add the proposed drafts to a step if each of its requests continues an answer."""
        entries = [entry for entry in plan.entries.values() if entry.request.drafts.token_ids]
        if not entries or not all(entry.request.is_decoding for entry in plan.entries.values()):
            return
        num_left = self._most_requests
        for entry in entries:
            if num_left:
                num_left -= self._add(plan, entry)

    def _add(self, plan: StepPlan, entry: ScheduledRequest) -> bool:
        """Return whether drafts were added."""
        request = entry.request
        drafts = request.drafts.token_ids[: max(0, min(plan.budget, _most_drafts(request, self._max_length)))]
        if self._pools.snapshots is not None:
            drafts = drafts[: self._pools.snapshots.most_drafts(request.num_computed_tokens)]
        # A token that ends the answer has nothing behind it to sample.
        ends = [place for place, token in enumerate(drafts) if token in request.stop_token_ids]
        drafts = drafts[: ends[0]] if ends else drafts
        bitmasks = []
        if (matcher := request.structured_output_request) is not None:
            bitmasks = matcher.masks_behind(drafts)
            drafts = drafts[: len(bitmasks)]
        num_needed = blocks_needed(request.num_tokens + len(drafts), self._pools.block_size)
        num_new = max(0, num_needed - self._pools.first.num_blocks_of(request.key))
        # What every running request may need for its next token stays free.
        if not drafts or not self._pools.can_allocate(num_new + len(self._queues.running.requests)):
            return False
        entry.add_blocks(self._pools.allocate(request.key, num_new))
        plan.add_drafts(entry, drafts, bitmasks)
        return True

    def request_drafts(self, plan: StepPlan, output: SchedulerOutput) -> None:
        """Set the drafts that the runner proposes behind the tokens of this step, and those that it compares only."""
        least = self._least_chance(len(plan.entries))
        trusted: list[Request] = []
        for entry in plan.entries.values():
            request = entry.request
            drafts = request.drafts
            if request.is_sending or request.is_pooling or request.engine_request.num_choices > 1:
                continue  # it ends here, or its choices separate
            if entry.num_tokens - len(entry.drafts) < request.num_missing_tokens:
                return  # in the middle of its prompt, so that the next step has no drafts
            if drafts.acceptance is None:
                drafts.acceptance = min(_UNTESTED, self._totals.spec_decoding.acceptance)
                drafts.next_comparison = request.answer_length + self._most
            if drafts.acceptance >= least and drafts.num_misses < _MISSES:
                trusted.append(request)
            elif least < 1 and request.answer_length >= drafts.next_comparison:
                drafts.next_comparison = request.answer_length + _COMPARE_EVERY
                output.num_compared_tokens[request.key] = self._most
        if trusted:
            output.num_draft_tokens = self._numbers(len(plan.entries), trusted)

    def learn(self, request: Request, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Record how a request's drafts in a step went, and keep what was proposed for the next one."""
        key = request.key
        row = output.req_id_to_index[key]
        drafts = request.drafts
        if verified := scheduled.scheduled_spec_decode_tokens.get(key):
            num_accepted = len(output.sampled_token_ids[row]) - 1
            drafts.record(len(verified), num_accepted)
            self._totals.spec_decoding.record(len(verified), num_accepted)
        drafts.token_ids = []
        if key in scheduled.num_draft_tokens:
            drafts.propose(output.spec_token_ids[row])
        elif key in output.num_right_drafts:
            drafts.num_misses = 0
            drafts.record(scheduled.num_compared_tokens[key], output.num_right_drafts[key])

    def _least_chance(self, num_requests: int) -> float:
        """Return the least chance of being right that makes one draft worth its time in a step of ``num_requests``."""
        if not num_requests:  # such a step has no cost to compare with
            return 1.0
        seconds = self.cost.seconds(num_requests)
        return _LEAST_WORTH * num_requests / seconds * (self.cost.seconds(num_requests + 1) - seconds)

    def _numbers(self, num_requests: int, requests: Sequence[Request]) -> dict[str, int]:
        """Return how many drafts each of these requests gets in a step of ``num_requests``; those with none are left out."""
        chances: list[tuple[float, str]] = []
        for request in requests:
            acceptance = request.drafts.acceptance or 0.0
            # It will have one token more by then.
            most = min(self._most, _most_drafts(request, self._max_length) - 1)
            chances += [(acceptance**place, request.key) for place in range(1, most + 1)]
        chances.sort(reverse=True)
        # How long a much larger step takes is not known.
        most_tokens = min(self._max_tokens, max(num_requests + self._most, 2 * self._num_last))
        seconds = self.cost.seconds(num_requests)
        slowest = self._fair_steps.max_slowdown_of_others * seconds
        num_tokens = float(num_requests)
        numbers: dict[str, int] = {}
        num_drafts = 0
        for chance, key in chances[: most_tokens - num_requests]:
            if len(numbers) == self._most_requests and key not in numbers:
                continue
            num_drafts += 1
            longer = self.cost.seconds(num_requests + num_drafts)
            # The chances fall, and each draft costs the same: if one is worth nothing, no later one is.
            if chance < _LEAST_WORTH * num_tokens / seconds * (longer - seconds) or longer > slowest:
                break
            num_tokens += chance
            seconds = longer
            numbers[key] = numbers.get(key, 0) + 1
        return numbers


def _most_drafts(request: Request, max_length: int) -> int:
    """Return how many drafts can be accepted behind the newest token before the answer's length ends it."""
    max_tokens = request.engine_request.sampling.max_tokens
    return min(max_tokens - request.answer_length, max_length - request.num_tokens) - 1
