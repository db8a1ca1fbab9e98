"""The plan of one step: how many tokens of which requests it computes. It becomes a SchedulerOutput."""

from collections.abc import Collection, Iterator, Sequence

import msgspec

from engine.outputs import CachedRequestData, NewRequestData, SchedulerOutput
from engine.scheduling.requests.request import Request


class ScheduledRequest(msgspec.Struct, frozen=True):
    """One request's part of a step. new_block_ids: replace the runner's if the request was preempted (``is_resumed``)."""

    request: Request
    num_tokens: int
    new_block_ids: list[int]
    is_resumed: bool = False


class StepPlan:
    """Owns the token budget of one step, and the requests that share it in the order of the batch.

    drafted_order: what ``to_output`` returns of a draft, and completes; None of others.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.num_preempted = 0
        self._entries: dict[str, ScheduledRequest] = {}
        self.drafted_order: SchedulerOutput | None = None

    @classmethod
    def drafted(cls, requests: Sequence[Request], budget: int) -> "StepPlan":
        """Return a plan of one token of each request, for when the step that runs now has sampled that token.

        The runner keeps the requests already. No blocks are allocated yet.
        """
        draft = cls(budget - len(requests))
        draft._entries = {request.key: ScheduledRequest(request, 1, []) for request in requests}
        draft.drafted_order = _output_of(draft._entries.values())
        draft.drafted_order.scheduled_cached_reqs.num_computed_tokens = [
            len(request.token_ids) for request in requests
        ]
        return draft

    def __iter__(self) -> Iterator[ScheduledRequest]:
        return iter(self._entries.values())

    def add(self, entry: ScheduledRequest) -> None:
        """Schedule a request in this step."""
        self._entries[entry.request.key] = entry
        self.budget -= entry.num_tokens

    def drop(self, request: Request) -> None:
        """Remove a request that was preempted; its tokens, if it was scheduled already, return to the budget."""
        self.num_preempted += 1
        entry = self._entries.pop(request.key, None)
        if entry is not None:
            self.budget += entry.num_tokens

    def to_output(self) -> SchedulerOutput:
        """Return the order to the runner, which from now on keeps every request in it."""
        return self.drafted_order or self._build_output()

    def _build_output(self) -> SchedulerOutput:
        output = _output_of(self._entries.values())
        for entry in self:
            if not entry.request.is_known_to_runner:
                output.scheduled_new_reqs.append(_new_request_data(entry))
                entry.request.is_known_to_runner = True
        return output


def _output_of(entries: Collection[ScheduledRequest]) -> SchedulerOutput:
    """Return what the requests compute, and the changes of those that the runner keeps.

    Blocks that are added to an entry later are included: the output refers to its list.
    """
    known = [entry for entry in entries if entry.request.is_known_to_runner]
    num_scheduled_tokens = {entry.request.key: entry.num_tokens for entry in entries}
    return SchedulerOutput(
        scheduled_cached_reqs=CachedRequestData(
            req_ids=[entry.request.key for entry in known],
            resumed_from_preemption=[entry.is_resumed for entry in known],
            new_token_ids=[list(entry.request.token_ids) if entry.is_resumed else [] for entry in known],
            new_block_ids=[(entry.new_block_ids,) for entry in known],
            num_computed_tokens=[entry.request.num_computed_tokens for entry in known],
        ),
        num_scheduled_tokens=num_scheduled_tokens,
        total_num_scheduled_tokens=sum(num_scheduled_tokens.values()),
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
