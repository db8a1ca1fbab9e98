"""The decision when a request is preempted, and which one.

A request is preempted when a running one needs a block for its next tokens and none is free. The last one in precedence
loses its blocks and is queued again, to be recomputed from its first token; it may be the request that needs the block.
So the first of all always advances, and two requests cannot preempt each other in turns. A prefill leg is never preempted,
because another worker reads its blocks (law 4). Requests that wait cause no preemption: they start if blocks are free.
"""

from itertools import chain

from engine.scheduling.blocks.block_pool import BlockPool, blocks_needed
from engine.scheduling.requests.queues import BatchQueues
from engine.scheduling.requests.request import Request
from engine.scheduling.requests.step_plan import StepPlan


class Preemption:
    """Allocates the blocks of running requests, and preempts requests where blocks run short."""

    def __init__(self, queues: BatchQueues, pool: BlockPool) -> None:
        self._queues = queues
        self._pool = pool

    def allocate(self, request: Request, num_tokens: int, plan: StepPlan) -> list[int] | None:
        """Allocate the blocks that a running request lacks for its next ``num_tokens``.

        Preempts other requests as needed. Returns None if the request was preempted itself.
        """
        num_needed = blocks_needed(request.num_computed_tokens + num_tokens, self._pool.block_size)
        num_new = max(0, num_needed - self._pool.num_blocks_of(request.key))
        while not self._pool.can_allocate(num_new):
            victim = self._victim()
            self._preempt(victim, plan)
            if victim is request:
                return None
        return self._pool.allocate(request.key, num_new)

    def _victim(self) -> Request:
        """Return the last request, in precedence, that holds blocks and does not lend them."""
        holders = chain(self._queues.running, self._queues.arrived)
        candidates = (request for request in holders if not request.is_sending)
        return max(candidates, key=lambda request: request.precedence)

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        plan.drop(request)
        self._queues.remove(request)
        self._pool.free(request.key)
        request.lose_blocks()
        self._queues.waiting.add(request)
