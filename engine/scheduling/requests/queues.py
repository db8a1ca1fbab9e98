"""The queues of the requests that could run."""

from engine.scheduling.blocks.block_pool import BlockPool, blocks_needed
from engine.scheduling.requests.priority_queue import PriorityQueue
from engine.scheduling.requests.request import Request
from engine.scheduling.requests.status import RequestStatus


class BatchQueues:
    """Owns the three queues; a request is in one of them at most.

    running: take part in steps. waiting: hold no blocks (new ones and preempted ones). arrived: wait for a place in the
    batch only; their prompt's KV is in their blocks already.
    """

    def __init__(self) -> None:
        self.running = PriorityQueue()
        self.waiting = PriorityQueue()
        self.arrived = PriorityQueue()

    def start(self, request: Request, queue: PriorityQueue) -> None:
        """Move a request from ``queue`` to the running ones."""
        request.status = RequestStatus.RUNNING
        queue.remove(request)
        self.running.add(request)

    def remove(self, request: Request) -> None:
        """Remove a request from the queue that it is in, if any."""
        _ = self.running.remove(request) or self.waiting.remove(request) or self.arrived.remove(request)

    def num_queued_prompt_tokens(self) -> int:
        """Return how many known tokens are not computed, but for the newest token of each answer."""
        waiting = sum(request.num_missing_tokens for request in self.waiting)
        return waiting + sum(
            request.num_missing_tokens for request in self.running if not request.is_decoding
        )

    def num_promised_blocks(self, pool: BlockPool) -> int:
        """Return how many blocks running requests lack for their known tokens: they started because these were free."""
        return sum(
            blocks_needed(request.num_tokens, pool.block_size) - pool.num_blocks_of(request.key)
            for request in self.running
        )
