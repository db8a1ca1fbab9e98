"""One step in the making: who computes how many tokens, until it becomes a SchedulerOutput."""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from engine.outputs import CachedRequestData, NewRequestData, SchedulerOutput
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.request import Request


class Turn(NamedTuple):
    """One request's part of a step. ``new_block_ids`` replace the runner's when the request comes back."""

    request: Request
    num_tokens: int
    new_block_ids: list[int]
    is_resumed: bool = False


class StepPlan:
    """Owns the token budget of one step and the turns taken from it, in the order of the batch."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.num_preempted = 0
        self._turns: dict[str, Turn] = {}
        self._drafted: SchedulerOutput | None = None

    @classmethod
    def drafted(cls, requests: Sequence[Request], budget: int) -> "StepPlan":
        """One token of each of these requests, which the runner knows, when a token more of each is known than now.

        All that is known now is computed by then. They get no blocks yet.
        """
        draft = cls(budget)
        for request in requests:
            draft.add(Turn(request, 1, []))
        draft._drafted = _orders(draft._turns.values())
        draft._drafted.scheduled_cached_reqs.num_computed_tokens = [
            request.num_tokens for request in requests
        ]
        return draft

    def __iter__(self) -> Iterator[Turn]:
        return iter(self._turns.values())

    def add(self, turn: Turn) -> None:
        """Give a request its turn."""
        self._turns[turn.request.key] = turn
        self.budget -= turn.num_tokens

    def drop(self, request: Request) -> None:
        """The request was preempted: its turn, if it had one, goes back into the budget."""
        self.num_preempted += 1
        turn = self._turns.pop(request.key, None)
        if turn is not None:
            self.budget += turn.num_tokens

    def to_output(self, pool: BlockPool) -> SchedulerOutput:
        """The orders to the runner, which from now on knows every request in them."""
        output = self._drafted or self._ordered()
        output.num_common_prefix_blocks = [pool.num_common_blocks(self._turns)]
        return output

    def _ordered(self) -> SchedulerOutput:
        output = _orders(self._turns.values())
        for turn in self:
            if not turn.request.is_known_to_runner:
                output.scheduled_new_reqs.append(_new_request_data(turn))
                turn.request.is_known_to_runner = True
        return output


def _orders(turns: Collection[Turn]) -> SchedulerOutput:
    """What they are to compute, and all that the runner must hear of those that it knows.

    Blocks that a turn gets later are among its orders too.
    """
    known = [turn for turn in turns if turn.request.is_known_to_runner]
    return SchedulerOutput(
        scheduled_cached_reqs=CachedRequestData(
            req_ids=[turn.request.key for turn in known],
            resumed_from_preemption=[turn.is_resumed for turn in known],
            new_token_ids=[list(turn.request.token_ids) if turn.is_resumed else [] for turn in known],
            new_block_ids=[(turn.new_block_ids,) for turn in known],
            num_computed_tokens=[turn.request.num_computed_tokens for turn in known],
        ),
        num_scheduled_tokens={turn.request.key: turn.num_tokens for turn in turns},
        total_num_scheduled_tokens=sum(turn.num_tokens for turn in turns),
    )


def _new_request_data(turn: Turn) -> NewRequestData:
    request = turn.request
    return NewRequestData(
        req_id=request.key,
        prompt_token_ids=list(request.token_ids),
        sampling_params=None if request.is_pooling else request.asked.sampling,
        block_ids=(list(turn.new_block_ids),),
        num_computed_tokens=request.num_computed_tokens,
        num_prompt_tokens=request.num_prompt_tokens - request.asked.num_delivered_tokens,
        num_choices=request.asked.num_choices,
        eos_token_ids=request.eos_token_ids,
        pooling_params=request.asked.pooling_params,
    )
