"""Several choices of one prompt: its KV is computed, or received, once, and each choice goes on from there.

Full blocks are shared; nobody writes them any more. The last one, if it is not full, is copied for each choice but the
first before the next forward pass: all are about to write it.
"""

from collections.abc import Sequence

from engine.connector import FirstToken
from engine.scheduling.batching import Batcher
from engine.scheduling.block_pool import BlockPool, blocks_needed
from engine.scheduling.ending import ABORTED, Ending
from engine.scheduling.outbox import Outbox
from engine.scheduling.request import Request
from engine.scheduling.request_index import RequestIndex


class Forking:
    """Parts choices from the request that stood for all of them. Owns the copies that the runner has not been told of."""

    def __init__(self, pool: BlockPool, batcher: Batcher, index: RequestIndex, outbox: Outbox) -> None:
        self._pool = pool
        self._batcher = batcher
        self._index = index
        self._outbox = outbox
        self._copies: list[tuple[int, int]] = []

    def take_copies(self) -> list[tuple[int, int]]:
        """(from, to) of the blocks that the runner shall copy before it computes anything else."""
        copies = self._copies
        self._copies = []
        return copies

    def part(
        self, choices: list[Request], endings: list[Ending | None], drawn: Sequence[FirstToken] = ()
    ) -> tuple[Ending | None, list[Request]]:
        """Each choice knows its first token: the forks say it, if it was ``drawn`` here, and end or run next.

        The first choice, which has the prompt in its blocks, stands for itself from now on. Returns how that one ends, and
        the forks that run.
        """
        first, *forks = choices
        running = []
        for place, fork in enumerate(forks, 1):
            ending = endings[place] or _ending_of_unwanted(fork, first)
            if drawn:
                self._outbox.first_token(fork, drawn[place], ending)
            elif ending:
                self._outbox.tokens(fork, [], ending)
            if ending is None:
                self._settle(fork, first)
                running.append(fork)
        if forks:
            self._index.discard(first.key)
            first.asked = first.asked.of_choice(first.asked.choice)
            self._index.add(first.asked, first.dismissed)
        return endings[0] or _ending_of_unwanted(first, first), running

    def _settle(self, fork: Request, first: Request) -> None:
        """Give it its blocks. Where none is free for its own tokens it computes again later, as after a preemption."""
        size = self._pool.block_size
        table = self._pool.table_of(first.key)
        num_full, is_partial = divmod(fork.num_computed_tokens, size)
        shared = table[:num_full]
        num_new = blocks_needed(fork.num_tokens, size) - num_full
        if not self._pool.can_allocate(num_new + self._batcher.num_promised_blocks, shared):
            fork.lose_blocks()
            self._batcher.waiting.add(fork)
            return
        own = self._pool.allocate(fork.key, num_new, shared)
        fork.num_indexed_blocks = first.num_indexed_blocks
        if is_partial:
            self._copies.append((table[num_full], own[num_full]))
        self._batcher.arrived.add(fork)


def choices_of(request: Request) -> list[Request]:
    """The request, which goes on as its first choice, and a fork for each other one."""
    return [request, *map(request.fork, request.asked.choices[1:])]


def _ending_of_unwanted(choice: Request, first: Request) -> Ending | None:
    return ABORTED if choice.asked.choice in first.dismissed else None
