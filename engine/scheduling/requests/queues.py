"""The queues of the requests that could run, in the order in which they get places and blocks: priority, then arrival.

They lose both in the opposite order, last to first.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Reversible
from operator import attrgetter

from engine.scheduling.blocks.block_pool import BlockPool, blocks_needed
from engine.scheduling.requests.finish import RequestStatus
from engine.scheduling.requests.request import Request

_PRECEDENCE = attrgetter("precedence")


class PriorityQueue(Reversible[Request]):
    """Requests sorted by ``Request.precedence``; one that is added again gets its old place.

    requests: the same as a list, which only this class changes.
    """

    def __init__(self) -> None:
        # Each step asks several times whether the queues are empty: a list answers without a call of Python's.
        self.requests: list[Request] = []
        self._by_client: dict[str, list[Request]] = {}

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    def __reversed__(self) -> Iterator[Request]:
        return reversed(self.requests)

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def first(self) -> Request | None:
        """The request that is next; None while the queue is empty."""
        return self.requests[0] if self.requests else None

    @property
    def clients(self) -> Collection[str]:
        """The clients that have requests in the queue."""
        return self._by_client.keys()

    def of(self, client: str) -> Iterator[Request]:
        """Return the requests of one of ``clients``, in their order."""
        return iter(self._by_client[client])

    def num_of(self, client: str) -> int:
        """Return how many requests of a client are queued."""
        return len(self._by_client.get(client, ()))

    def add(self, request: Request) -> None:
        """Queue a request, which must not be queued already."""
        insort(self.requests, request, key=_PRECEDENCE)
        insort(self._by_client.setdefault(request.engine_request.tenant, []), request, key=_PRECEDENCE)

    def remove(self, request: Request) -> bool:
        """Remove a request; return False if it is not queued."""
        if not _remove(self.requests, request):
            return False
        own = self._by_client[request.engine_request.tenant]
        _remove(own, request)
        if not own:
            del self._by_client[request.engine_request.tenant]
        return True


def _remove(requests: list[Request], request: Request) -> bool:
    place = bisect_left(requests, request.precedence, key=_PRECEDENCE)
    if place == len(requests) or requests[place] is not request:
        return False
    del requests[place]
    return True


def comes_first(request: Request, other: Request | None) -> bool:
    """Return whether ``request`` is served before ``other``, or there is no other."""
    return other is None or request.precedence < other.precedence


class BatchQueues:
    """Owns the three queues; a request is in one of them at most.

    running: take part in steps. waiting: hold no blocks (new ones and preempted ones). arrived: wait for a place in the
    batch only: the KV that came from another worker or a tier is in their blocks, and the rest has its blocks.
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
        num_tokens = 0
        for request in self.waiting.requests:
            num_tokens += request.num_missing_tokens
        for request in self.running.requests:
            if not request.is_decoding:
                num_tokens += request.num_missing_tokens
        return num_tokens

    def promised_blocks(self, pool: BlockPool) -> list[int]:
        """Return how many blocks each running request lacks for its known tokens: it started because these were free."""
        # One that had drafts may have more than it needs now.
        return [
            max(0, blocks_needed(request.num_tokens, pool.block_size) - pool.num_blocks_of(request.key))
            for request in self.running.requests
        ]

    def num_promised_blocks(self, pool: BlockPool) -> int:
        """Return the sum of ``promised_blocks``."""
        return sum(self.promised_blocks(pool))
