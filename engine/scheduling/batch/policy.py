"""The scheduling policies: which of the queued requests may join a step, and when. The ``Batcher`` gives them blocks.

``ChunkedPrefill`` lets answers and prompts share each step. A prompt is cut into chunks, so that the gap between two tokens
of a running answer is one step of bounded length, however long the prompt is.

``PrefillFirst`` is the policy of vLLM's first engine: a step computes prompts only, or answers only, and prompts come first.
A prompt is computed in one step. So its first token comes as early as it can, and running answers wait until no prompt is
left that could start. A delay may let several prompts gather before the next step of prompts.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum, auto
from itertools import chain

from engine.options import BatchingOptions
from engine.scheduling.requests.queues import BatchQueues
from engine.scheduling.requests.request import Request


class Stage(Enum):
    """The content of a step. MIXED: prompts, in chunks, and answers. PREFILL: whole prompts only. DECODE: answers only."""

    MIXED = auto()
    PREFILL = auto()
    DECODE = auto()

    def holds(self, request: Request) -> bool:
        """Return whether a step of this stage may compute the request."""
        return self is Stage.MIXED or request.is_decoding is (self is Stage.DECODE)


class SchedulingPolicy(ABC):
    """Decides what the next step may hold. last_prompt_latency: seconds of the last step of stage PREFILL."""

    def __init__(self, options: BatchingOptions, queues: BatchQueues, clock: Callable[[], float]) -> None:
        self.last_prompt_latency = 0.0
        self._options = options
        self._queues = queues
        self._clock = clock

    @abstractmethod
    def budget(self) -> int:
        """Return how many tokens the next step may compute."""

    @abstractmethod
    def stages(self) -> Sequence[Stage]:
        """Return the stages that the next step may have: the first one in which a request can be computed is chosen."""


class ChunkedPrefill(SchedulingPolicy):
    """Decodes first, and chunks of prompts in what is left of the step's budget."""

    def budget(self) -> int:
        """See SchedulingPolicy."""
        going_on = chain(self._queues.running.requests, self._queues.arrived.requests)
        num_answers = sum(request.is_decoding for request in going_on)
        budget = self._options.max_num_batched_tokens
        # Beside answers, prompts get less: each of their tokens delays the next token of all answers.
        return min(budget, num_answers + self._options.max_num_mixed_tokens) if num_answers else budget

    def stages(self) -> Sequence[Stage]:
        """See SchedulingPolicy."""
        return (Stage.MIXED,)


class PrefillFirst(SchedulingPolicy):
    """Prompts first, as many as fit; answers only in a step in which no prompt can start.

    Only a request that was preempted, or continues the answer of another worker, may be longer than a step. It is computed
    in chunks, in steps of its own.
    """

    def budget(self) -> int:
        """See SchedulingPolicy."""
        return self._options.max_num_batched_tokens

    def stages(self) -> Sequence[Stage]:
        """See SchedulingPolicy."""
        return (Stage.PREFILL, Stage.DECODE) if self._may_prefill() else (Stage.DECODE,)

    def _may_prefill(self) -> bool:
        """Return whether waiting prompts have gathered for long enough, or nothing runs that they would delay."""
        queues = self._queues
        factor = self._options.scheduler_delay_factor
        if not factor or not queues.waiting.requests or not queues.running.requests:
            return True
        begun = chain(queues.running.requests, queues.arrived.requests)
        if any(not request.is_decoding for request in begun):
            return True  # one that is longer than a step, or that a KV tier had a part of
        earliest_arrival = min(request.milestones.queued for request in queues.waiting.requests)
        return self._clock() - earliest_arrival > factor * self.last_prompt_latency


POLICIES: dict[str, Callable[[BatchingOptions, BatchQueues, Callable[[], float]], SchedulingPolicy]] = {
    "chunked-prefill": ChunkedPrefill,
    "prefill-first": PrefillFirst,
}
"""Policies by the values of ``scheduling_policy``."""
