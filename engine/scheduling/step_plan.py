"""One step in the making: how many tokens of which requests it computes, until it becomes a SchedulerOutput."""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from engine.outputs import CachedRequestData, NewRequestData, SchedulerOutput
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.request import Request


class ScheduledRequest(NamedTuple):
    """One request's part of a step. ``new_block_ids`` replace the runner's when the request comes back."""

    request: Request
    num_tokens: int
    new_block_ids: list[int]
    is_resumed: bool = False


class StepPlan:
    """Owns the token budget of one step and the requests that take from it, in the order of the batch."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.num_preempted = 0
        self._entries: dict[str, ScheduledRequest] = {}
        self._drafted: SchedulerOutput | None = None

    @classmethod
    def drafted(cls, requests: Sequence[Request], budget: int) -> "StepPlan":
        """Return a plan of one token of each of these requests, for the time when one token more of each is known than now.

        The runner knows the requests, and all that is known now is computed by then. They get no blocks yet.
        """
        draft = cls(budget)
        for request in requests:
            draft.add(ScheduledRequest(request, 1, []))
        draft._drafted = _orders(draft._entries.values())
        draft._drafted.scheduled_cached_reqs.num_computed_tokens = [
            request.num_tokens for request in requests
        ]
        return draft

    def __iter__(self) -> Iterator[ScheduledRequest]:
        return iter(self._entries.values())

    def add(self, entry: ScheduledRequest) -> None:
        """Schedule a request in this step."""
        self._entries[entry.request.key] = entry
        self.budget -= entry.num_tokens

    def drop(self, request: Request) -> None:
        """Take out a request that was preempted; its tokens, if it had any here, go back into the budget."""
        self.num_preempted += 1
        entry = self._entries.pop(request.key, None)
        if entry is not None:
            self.budget += entry.num_tokens

    def to_output(self, pool: BlockPool) -> SchedulerOutput:
        """Return the orders to the runner, which from now on knows every request in them."""
        output = self._drafted or self._ordered()
        output.num_common_prefix_blocks = [pool.num_common_blocks(self._entries)]
        return output

    def _ordered(self) -> SchedulerOutput:
        output = _orders(self._entries.values())
        for entry in self:
            if not entry.request.is_known_to_runner:
                output.scheduled_new_reqs.append(_new_request_data(entry))
                entry.request.is_known_to_runner = True
        return output


def _orders(entries: Collection[ScheduledRequest]) -> SchedulerOutput:
    """Return what the requests are to compute, and all that the runner must be told about those that it knows.

    Blocks that an entry gets later are among its orders too.
    """
    known = [entry for entry in entries if entry.request.is_known_to_runner]
    return SchedulerOutput(
        scheduled_cached_reqs=CachedRequestData(
            req_ids=[entry.request.key for entry in known],
            resumed_from_preemption=[entry.is_resumed for entry in known],
            new_token_ids=[list(entry.request.token_ids) if entry.is_resumed else [] for entry in known],
            new_block_ids=[(entry.new_block_ids,) for entry in known],
            num_computed_tokens=[entry.request.num_computed_tokens for entry in known],
        ),
        num_scheduled_tokens={entry.request.key: entry.num_tokens for entry in entries},
        total_num_scheduled_tokens=sum(entry.num_tokens for entry in entries),
    )


def _new_request_data(entry: ScheduledRequest) -> NewRequestData:
    request = entry.request
    return NewRequestData(
        req_id=request.key,
        prompt_token_ids=list(request.token_ids),
        sampling_params=None if request.is_pooling else request.asked.sampling,
        block_ids=(list(entry.new_block_ids),),
        num_computed_tokens=request.num_computed_tokens,
        num_prompt_tokens=request.num_prompt_tokens - request.asked.num_delivered_tokens,
        num_choices=request.asked.num_choices,
        eos_token_ids=request.eos_token_ids,
        pooling_params=request.asked.pooling_params,
    )
