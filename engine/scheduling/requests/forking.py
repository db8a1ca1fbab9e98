"""Several choices of one prompt: its KV is computed, or received, once, and each choice continues from there.

Full blocks are shared, since no request writes them any more. The last one, if it is not full, is copied for each choice
but the first before the next forward pass, which writes it.
"""

from collections.abc import Sequence

from engine.connector import FirstToken
from engine.scheduling.blocks.block_pool import BlockPool, blocks_needed
from engine.scheduling.requests.finish import ABORTED, Finish
from engine.scheduling.requests.outbox import Outbox
from engine.scheduling.requests.queues import BatchQueues
from engine.scheduling.requests.request import Request
from engine.scheduling.requests.request_index import RequestIndex


class Forking:
    """Separates choices from the request that stood for all of them. Owns the block copies that are not ordered yet."""

    def __init__(self, pool: BlockPool, queues: BatchQueues, index: RequestIndex, outbox: Outbox) -> None:
        self._pool = pool
        self._queues = queues
        self._index = index
        self._outbox = outbox
        self._copies: list[tuple[int, int]] = []

    def take_copies(self) -> list[tuple[int, int]]:
        """Return (from, to) of the blocks that the runner must copy before it computes anything else."""
        copies = self._copies
        self._copies = []
        return copies

    def separate(
        self, choices: list[Request], finishes: list[Finish | None], sampled: Sequence[FirstToken] = ()
    ) -> tuple[Finish | None, list[Request]]:
        """Separate choices that have their first tokens; forks finish, or are queued.

        sampled: the first tokens, if they were sampled here, to be sent for the forks. The first choice, which has the
        prompt in its blocks, stands for itself from now on. Returns how that one finishes, and the forks that continue.
        """
        first, *forks = choices
        running = []
        for place, fork in enumerate(forks, 1):
            finish = finishes[place] or _finish_of_dismissed(fork, first)
            if sampled:
                self._outbox.add_first_token(fork, sampled[place], finish)
            elif finish:
                self._outbox.add(fork, [], finish)
            if finish is None:
                self._queue(fork, first)
                running.append(fork)
        if forks:
            self._index.discard(first.key)
            first.asked = first.asked.of_choice(first.asked.choice)
            self._index.add(first.asked, first.dismissed)
        return finishes[0] or _finish_of_dismissed(first, first), running

    def _queue(self, fork: Request, first: Request) -> None:
        """Allocate the fork's blocks and queue it. If too few are free, it is recomputed later, as after a preemption."""
        size = self._pool.block_size
        table = self._pool.table_of(first.key)
        num_full, num_rest = divmod(fork.num_computed_tokens, size)
        shared = table[:num_full]
        num_new = blocks_needed(fork.num_tokens, size) - num_full
        if not self._pool.can_allocate(num_new + self._queues.num_promised_blocks(self._pool), shared):
            fork.lose_blocks()
            self._queues.waiting.add(fork)
            return
        own = self._pool.allocate(fork.key, num_new, shared)
        fork.num_indexed_blocks = first.num_indexed_blocks
        if num_rest:
            self._copies.append((table[num_full], own[num_full]))
        self._queues.arrived.add(fork)


def choices_of(request: Request) -> list[Request]:
    """Return the request, which continues as its first choice, and a fork for each other one."""
    return [request, *map(request.fork, request.asked.choices[1:])]


def _finish_of_dismissed(choice: Request, first: Request) -> Finish | None:
    return ABORTED if choice.asked.choice in first.dismissed else None
