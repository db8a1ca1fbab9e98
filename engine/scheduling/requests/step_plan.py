"""The plan of one step: how many tokens of which requests it computes. It becomes a SchedulerOutput."""

from collections.abc import Collection, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.outputs import CachedRequestData, NewRequestData, SchedulerOutput
from engine.scheduling.blocks.cache_pools import Blocks
from engine.scheduling.requests.request import Request


class ScheduledRequest(msgspec.Struct, frozen=True):
    """One request's part of a step.

    num_tokens: with its drafts. new_block_ids: of each group; they replace the runner's if the request was preempted
    (``is_resumed``). drafts: computed behind its newest token. bitmasks: what its grammar allows behind each of them.
    """

    request: Request
    num_tokens: int
    new_block_ids: Blocks
    is_resumed: bool = False
    drafts: Sequence[int] = ()
    bitmasks: Sequence[NDArray[np.int32]] = ()

    def add_blocks(self, blocks: Blocks) -> None:
        """Add blocks of each group to the new ones."""
        for own, added in zip(self.new_block_ids, blocks, strict=True):
            own.extend(added)


class StepPlan:
    """Owns the token budget of one step, and the requests that share it in the order of the batch.

    entries: its requests, by key. next_output: what ``to_output`` returns of a next step, and completes; None of others.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.num_preempted = 0
        self.entries: dict[str, ScheduledRequest] = {}
        self.next_output: SchedulerOutput | None = None

    @classmethod
    def of_next_step(cls, requests: Sequence[Request], budget: int, num_groups: int = 1) -> "StepPlan":
        """Return a plan of one token of each request, for when the step that runs now has sampled that token.

        The runner keeps the requests already. No blocks are allocated yet. num_groups: of layers.
        """
        plan = cls(budget - len(requests))
        # When that step has ended, all tokens that are known now are computed; the requests count them only then.
        num_computed_tokens = []
        # A loop, here and elsewhere on the way of a step, where each comprehension would be one call of Python more.
        for request in requests:
            blocks: Blocks = ([],) if num_groups == 1 else tuple([[] for _ in range(num_groups)])
            plan.entries[request.key] = ScheduledRequest(request, 1, blocks)
            num_computed_tokens.append(len(request.token_ids))
        plan.next_output = _output_of(plan.entries.values())
        plan.next_output.scheduled_cached_reqs.num_computed_tokens = num_computed_tokens
        return plan

    def add(self, entry: ScheduledRequest) -> None:
        """Schedule a request in this step."""
        self.entries[entry.request.key] = entry
        self.budget -= entry.num_tokens

    def add_drafts(
        self, entry: ScheduledRequest, drafts: list[int], bitmasks: Sequence[NDArray[np.int32]]
    ) -> None:
        """Compute drafts behind the newest token of a request of this step, which has blocks for them."""
        num_tokens = entry.num_tokens + len(drafts)
        self.entries[entry.request.key] = msgspec.structs.replace(
            entry, num_tokens=num_tokens, drafts=drafts, bitmasks=bitmasks
        )
        self.budget -= len(drafts)

    def drop(self, request: Request) -> None:
        """Remove a request that was preempted; its tokens, if it was scheduled already, return to the budget."""
        self.num_preempted += 1
        entry = self.entries.pop(request.key, None)
        if entry is not None:
            self.budget += entry.num_tokens

    def to_output(self) -> SchedulerOutput:
        """Return the order to the runner, which from now on keeps every request in it."""
        if self.next_output is not None:
            return self.next_output
        output = _output_of(self.entries.values())
        for entry in self.entries.values():
            request = entry.request
            if request.is_known_to_runner:
                continue
            engine_request = request.engine_request
            output.scheduled_new_reqs.append(
                NewRequestData(
                    req_id=request.key,
                    prompt_token_ids=list(request.token_ids),
                    sampling_params=None if request.is_pooling else engine_request.sampling,
                    block_ids=tuple(map(list, entry.new_block_ids)),
                    num_computed_tokens=request.num_computed_tokens,
                    num_prompt_tokens=request.num_prompt_tokens - engine_request.num_delivered_tokens,
                    num_choices=engine_request.num_choices,
                    eos_token_ids=request.eos_token_ids,
                    pooling_params=engine_request.pooling_params,
                )
            )
            request.is_known_to_runner = True
        return output


def _output_of(entries: Collection[ScheduledRequest]) -> SchedulerOutput:
    """Return what the requests compute, and the changes of those that the runner keeps.

    Blocks that are added to an entry later are included: the output refers to its list.
    """
    cached = CachedRequestData()
    num_scheduled_tokens: dict[str, int] = {}
    drafts: dict[str, list[int]] = {}
    for entry in entries:
        request = entry.request
        num_scheduled_tokens[request.key] = entry.num_tokens
        if entry.drafts:
            drafts[request.key] = list(entry.drafts)
        if request.is_known_to_runner:
            cached.req_ids.append(request.key)
            cached.resumed_from_preemption.append(entry.is_resumed)
            cached.new_token_ids.append(list(request.token_ids) if entry.is_resumed else [])
            cached.new_block_ids.append(entry.new_block_ids)
            cached.num_computed_tokens.append(request.num_computed_tokens)
    return SchedulerOutput(
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=num_scheduled_tokens,
        total_num_scheduled_tokens=sum(num_scheduled_tokens.values()),
        scheduled_spec_decode_tokens=drafts,
    )
